/*
 * driver-launch.c: modules, functions and kernel launches.
 *
 * No code runs. A module is PTX text; its functions are the names after `.entry`, and a launch takes its time on the simulated SMs:
 * RIGEL_SIM_KERNEL_NS for each block (5000 without it), or, for a function called rigel_spin or rigel_stream, what its second parameter
 * says; rigel_stream is bound by memory, of whose bandwidth it takes what its third says. Compiled images (cubin, fatbin) are refused with
 * INVALID_IMAGE.
 */
#include "driver.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    DEFAULT_BLOCK_NS = 5000,
    REGISTERS = 32,             /* what each thread of every function uses: full occupancy at any block size */
    DEFAULT_DYNAMIC = 48 << 10, /* shared memory a launch may ask for without cuFuncSetAttribute */
};

/* ---- Modules and libraries */

void sim_delete_module(sim_object *module)
{
    for (size_t i = 0; i < module->module.count; i++) {
        if (module->module.functions[i]) sim_delete(module->module.functions[i]);
        free(module->module.names[i]);
    }
    free(module->module.names);
    free(module->module.functions);
    sim_delete(module);
}

static int is_compiled(const char *image)
{
    static const unsigned char elf[] = {0x7f, 'E', 'L', 'F'}, wrapper[] = {0xb1, 0x43, 0x62, 0x46},
                               fatbin[] = {0x50, 0xed, 0x55, 0xba};
    return !strncmp(image, (const char *)elf, 4) || !strncmp(image, (const char *)wrapper, 4) ||
           !strncmp(image, (const char *)fatbin, 4);
}

static int add_name(sim_object *module, const char *name, size_t length)
{
    size_t n = module->module.count + 1;
    char **names = realloc(module->module.names, n * sizeof *names);
    if (names) module->module.names = names;
    sim_object **functions = realloc(module->module.functions, n * sizeof *functions);
    if (functions) module->module.functions = functions;
    if (!names || !functions || !(names[n - 1] = strndup(name, length))) return 0;
    functions[n - 1] = NULL;
    module->module.count = n;
    return 1;
}

static CUresult load(const char *image, sim_object *context, void *out)
{
    if (!image || !out) return CUDA_ERROR_INVALID_VALUE;
    if (is_compiled(image)) return CUDA_ERROR_INVALID_IMAGE;
    CUresult r = CUDA_SUCCESS;
    pthread_mutex_lock(&sim.lock);
    sim_object *m = sim_new(SIM_MODULE, context);
    if (!m) r = CUDA_ERROR_OUT_OF_MEMORY;
    for (const char *at = image; m && r == CUDA_SUCCESS && (at = strstr(at, ".entry"));) {
        at += strlen(".entry");
        if (!isspace((unsigned char)*at)) continue;
        while (isspace((unsigned char)*at)) at++;
        size_t length = strspn(at, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_$");
        if (length && !add_name(m, at, length)) r = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (m && r) sim_delete_module(m);
    if (r == CUDA_SUCCESS) *(void **)out = sim_handle(m);
    pthread_mutex_unlock(&sim.lock);
    return r;
}

API CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    sim_object *context;
    CUresult r = sim_current(&context);
    return r ? r : load(image, context, module);
}

/* Options are for the compiler, which there is none of. */
API CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, void *options, void **values)
{
    (void)options;
    sim_object *context;
    CUresult r = sim_current(&context);
    if (r) return r;
    return count && !values ? CUDA_ERROR_INVALID_VALUE : load(image, context, module);
}

API CUresult cuModuleLoad(CUmodule *module, const char *path)
{
    sim_object *context;
    CUresult r = sim_current(&context);
    if (r) return r;
    if (!path) return CUDA_ERROR_INVALID_VALUE;
    FILE *f = fopen(path, "rbe");
    char *text = NULL;
    size_t size = 0;
    if (!f) return CUDA_ERROR_FILE_NOT_FOUND;
    ssize_t n = getdelim(&text, &size, '\0', f); /* PTX is text: all of it */
    fclose(f);
    r = n > 0 ? load(text, context, module) : CUDA_ERROR_INVALID_IMAGE;
    free(text);
    return r;
}

/* A library goes with no context: its kernels may be launched in any. */
API CUresult cuLibraryLoadData(CUlibrary *library, const void *code, void *jit_options, void **jit_values,
                               unsigned jit_count, void *options, void **values, unsigned count)
{
    (void)jit_options;
    (void)options;
    CUresult r = sim_enter();
    if (r) return r;
    if ((jit_count && !jit_values) || (count && !values)) return CUDA_ERROR_INVALID_VALUE;
    return load(code, NULL, library);
}

static CUresult unload(void *handle)
{
    CUresult r = sim_enter();
    if (r) return r;
    pthread_mutex_lock(&sim.lock);
    sim_object *m = sim_get(handle, SIM_MODULE);
    if (m) sim_delete_module(m);
    pthread_mutex_unlock(&sim.lock);
    return m ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API CUresult cuModuleUnload(CUmodule module)
{
    return unload(module);
}

API CUresult cuLibraryUnload(CUlibrary library)
{
    return unload(library);
}

static CUresult find_function(void *module, const char *name, void *out)
{
    CUresult r = sim_enter();
    if (r) return r;
    if (!name || !out) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim.lock);
    sim_object *m = sim_get(module, SIM_MODULE), *f = NULL;
    size_t i = 0;
    while (m && i < m->module.count && strcmp(m->module.names[i], name)) i++;
    if (!m) r = CUDA_ERROR_INVALID_HANDLE;
    else if (i == m->module.count) r = CUDA_ERROR_NOT_FOUND;
    else if (!(f = m->module.functions[i]) && !(f = sim_new(SIM_FUNCTION, m->context))) r = CUDA_ERROR_OUT_OF_MEMORY;
    if (r == CUDA_SUCCESS && !m->module.functions[i]) {
        f->function.name = m->module.names[i];
        f->function.module = m;
        f->function.registers = REGISTERS;
        atomic_store(&f->function.dynamic_shared, DEFAULT_DYNAMIC);
        f->function.streams = strcmp(name, "rigel_stream") == 0;
        f->function.spins = f->function.streams || strstr(name, "rigel_spin") != NULL; /* also the stand-in NCCL's */
        m->module.functions[i] = f;
    }
    if (r == CUDA_SUCCESS) *(void **)out = sim_handle(f);
    pthread_mutex_unlock(&sim.lock);
    return r;
}

API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    return find_function(module, name, function);
}

API CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    return find_function(library, name, kernel);
}

static CUresult count_functions(unsigned *count, void *module)
{
    CUresult r = sim_enter();
    if (r) return r;
    sim_object *m = sim_get(module, SIM_MODULE);
    if (!m) return CUDA_ERROR_INVALID_HANDLE;
    if (!count) return CUDA_ERROR_INVALID_VALUE;
    *count = (unsigned)m->module.count;
    return CUDA_SUCCESS;
}

API CUresult cuModuleGetFunctionCount(unsigned *count, CUmodule module)
{
    return count_functions(count, module);
}

API CUresult cuLibraryGetKernelCount(unsigned *count, CUlibrary library)
{
    return count_functions(count, library);
}

/* ---- Functions: a CUkernel may be given for a CUfunction, and is the same thing here. */

static CUresult enter_function(const void *handle, sim_object **f)
{
    CUresult r = sim_enter();
    if (r) return r;
    *f = sim_get(handle, SIM_FUNCTION);
    return *f ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    sim_object *f, *context;
    CUresult r = enter_function(kernel, &f);
    if (r || (r = sim_current(&context))) return r;
    if (!function) return CUDA_ERROR_INVALID_VALUE;
    *function = sim_handle(f);
    return CUDA_SUCCESS;
}

static CUresult get_name(const char **name, const void *handle)
{
    sim_object *f;
    CUresult r = enter_function(handle, &f);
    if (r) return r;
    if (!name) return CUDA_ERROR_INVALID_VALUE;
    *name = f->function.name;
    return CUDA_SUCCESS;
}

API CUresult cuFuncGetName(const char **name, CUfunction function)
{
    return get_name(name, function);
}

API CUresult cuKernelGetName(const char **name, CUkernel kernel)
{
    return get_name(name, kernel);
}

static CUresult get_module(void *out, const void *handle)
{
    sim_object *f;
    CUresult r = enter_function(handle, &f);
    if (r) return r;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *(void **)out = sim_handle(f->function.module);
    return CUDA_SUCCESS;
}

API CUresult cuFuncGetModule(CUmodule *module, CUfunction function)
{
    return get_module(module, function);
}

API CUresult cuKernelGetLibrary(CUlibrary *library, CUkernel kernel)
{
    return get_module(library, kernel);
}

static CUresult get_attribute(int *value, int attribute, const void *handle, int device)
{
    sim_object *f;
    CUresult r = enter_function(handle, &f);
    if (r) return r;
    if (!value || device < 0 || device >= sim.devices) return CUDA_ERROR_INVALID_VALUE;
    const rg_model_params *p = sim_params(device);
    int version = (int)(p->compute_major * 10 + p->compute_minor);
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = (int)p->threads_per_block; break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = 0; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = f->function.registers; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = version; break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = atomic_load(&f->function.dynamic_shared); break;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: *value = -1; break; /* no preference */
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

API CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction function)
{
    return get_attribute(value, attribute, function, 0);
}

API CUresult cuKernelGetAttribute(int *value, int attribute, CUkernel kernel, CUdevice device)
{
    return get_attribute(value, attribute, kernel, device);
}

static CUresult set_attribute(int attribute, int value, const void *handle, int device)
{
    sim_object *f;
    CUresult r = enter_function(handle, &f);
    if (r) return r;
    if (device < 0 || device >= sim.devices) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        if (value < 0 || value > (int)sim_params(device)->shared_bytes_per_block) return CUDA_ERROR_INVALID_VALUE;
        atomic_store(&f->function.dynamic_shared, value);
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: /* a hint; the model's SMs give what is asked for */
        return value >= -1 && value <= 100 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

API CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value)
{
    return set_attribute(attribute, value, function, 0);
}

API CUresult cuKernelSetAttribute(int attribute, int value, CUkernel kernel, CUdevice device)
{
    return set_attribute(attribute, value, kernel, device);
}

static CUresult max_active(int *blocks, const void *handle, int threads, size_t dynamic)
{
    sim_object *f, *context;
    CUresult r = enter_function(handle, &f);
    if (r || (r = sim_current(&context))) return r;
    const rg_model_params *p = sim_params(context->device);
    if (!blocks || threads <= 0 || threads > (int)p->threads_per_block) return CUDA_ERROR_INVALID_VALUE;
    rg_model_kernel k = {.blocks = 1, .threads = (uint32_t)threads, .registers = (uint32_t)f->function.registers};
    k.shared_bytes = dynamic > UINT32_MAX ? UINT32_MAX : (uint32_t)dynamic;
    *blocks = (int)rg_model_occupancy(p, &k);
    return CUDA_SUCCESS;
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t dynamic)
{
    return max_active(blocks, function, threads, dynamic);
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int threads,
                                                                  size_t dynamic, unsigned flags)
{
    return flags > 1 ? CUDA_ERROR_INVALID_VALUE : max_active(blocks, function, threads, dynamic);
}

/* ---- Launches */

static uint64_t default_block_ns;
static void read_default(void)
{
    const char *text = getenv("RIGEL_SIM_KERNEL_NS");
    unsigned long long ns = text ? strtoull(text, NULL, 10) : 0;
    default_block_ns = ns ? ns : DEFAULT_BLOCK_NS;
}

/* rigel_spin(u64 iterations, u64 block_ns): the second parameter, however parameters were handed over. */
static CUresult spin_ns(void **params, void **extra, uint64_t *ns)
{
    if (params && params[1]) {
        memcpy(ns, params[1], sizeof *ns);
        return CUDA_SUCCESS;
    }
    const char *buffer = NULL;
    size_t size = 0;
    for (; extra && *extra != CU_LAUNCH_PARAM_END; extra += 2) {
        if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = extra[1];
        else if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE) memcpy(&size, extra[1], sizeof size);
        else return CUDA_ERROR_INVALID_VALUE;
    }
    if (!buffer || size < 2 * sizeof *ns) return CUDA_ERROR_INVALID_VALUE;
    memcpy(ns, buffer + sizeof *ns, sizeof *ns);
    return CUDA_SUCCESS;
}

typedef struct {
    CUlaunchConfig config;
    int per_thread, cooperative, priority;
} launch_how;

static int bad_shape(const CUlaunchConfig *c, const rg_model_params *p)
{
    uint64_t threads = (uint64_t)c->blockDimX * c->blockDimY * c->blockDimZ;
    return !c->gridDimX || !c->gridDimY || !c->gridDimZ || c->gridDimX > 0x7fffffff || c->gridDimY > 65535 ||
           c->gridDimZ > 65535 || !threads || c->blockDimX > 1024 || c->blockDimY > 1024 || c->blockDimZ > 64 ||
           threads > p->threads_per_block;
}

static CUresult launch(const launch_how *how, CUfunction function, void **params, void **extra)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    const CUlaunchConfig *c = &how->config;
    sim_object *context, *s;
    CUresult r = sim_current(&context);
    if (r || (r = sim_stream(c->hStream, how->per_thread, &s))) return r;
    sim_object *f = sim_get(function, SIM_FUNCTION);
    if (!f || s->context != context || (f->context && f->context != context)) return CUDA_ERROR_INVALID_HANDLE;
    const rg_model_params *p = sim_params(context->device);
    if (bad_shape(c, p) || c->sharedMemBytes > (unsigned)atomic_load(&f->function.dynamic_shared) || (params && extra))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_once(&once, read_default);
    sim_work w = {.kind = SIM_KERNEL, .priority = how->priority};
    w.kernel.blocks = (uint64_t)c->gridDimX * c->gridDimY * c->gridDimZ;
    w.kernel.threads = c->blockDimX * c->blockDimY * c->blockDimZ;
    w.kernel.registers = (uint32_t)f->function.registers;
    w.kernel.shared_bytes = c->sharedMemBytes;
    w.kernel.block_ns = default_block_ns;
    if (f->function.spins && (r = spin_ns(params, extra, &w.kernel.block_ns))) return r;
    if (f->function.streams && params && params[2]) {
        uint64_t permille;
        memcpy(&permille, params[2], sizeof permille);
        w.kernel.memory_permille = permille < 1000 ? (uint32_t)permille : 1000;
        w.kernel.memory_bound = true;
    }
    uint32_t per_sm = rg_model_occupancy(p, &w.kernel);
    if (!per_sm) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    /* A cooperative grid must fit as a whole; it gets no special treatment beyond that. */
    if (how->cooperative && w.kernel.blocks > (uint64_t)per_sm * p->sms) return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
    w.params = (CUDA_KERNEL_NODE_PARAMS){
        .func = function,
        .gridDimX = c->gridDimX,
        .gridDimY = c->gridDimY,
        .gridDimZ = c->gridDimZ,
        .blockDimX = c->blockDimX,
        .blockDimY = c->blockDimY,
        .blockDimZ = c->blockDimZ,
        .sharedMemBytes = c->sharedMemBytes,
        .ctx = sim_handle(context),
    };
    return sim_submit(s, &w, NULL);
}

static CUresult launch_kernel(int pt, int cooperative, CUfunction f, const unsigned shape[7], CUstream s, void **params,
                              void **extra)
{
    launch_how how = {.per_thread = pt, .cooperative = cooperative, .priority = RG_MODEL_INHERIT};
    how.config = (CUlaunchConfig){shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], s, NULL, 0};
    return launch(&how, f, params, extra);
}

API CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                            unsigned shared, CUstream s, void **params, void **extra)
{
    return launch_kernel(0, 0, f, (unsigned[]){gx, gy, gz, bx, by, bz, shared}, s, params, extra);
}

API CUresult cuLaunchKernel_ptsz(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                 unsigned bz, unsigned shared, CUstream s, void **params, void **extra)
{
    return launch_kernel(1, 0, f, (unsigned[]){gx, gy, gz, bx, by, bz, shared}, s, params, extra);
}

API CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                       unsigned bz, unsigned shared, CUstream s, void **params)
{
    return launch_kernel(0, 1, f, (unsigned[]){gx, gy, gz, bx, by, bz, shared}, s, params, NULL);
}

API CUresult cuLaunchCooperativeKernel_ptsz(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                            unsigned by, unsigned bz, unsigned shared, CUstream s, void **params)
{
    return launch_kernel(1, 1, f, (unsigned[]){gx, gy, gz, bx, by, bz, shared}, s, params, NULL);
}

/* On several devices at once is not simulated. */
API CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *l, unsigned n, unsigned flags)
{
    (void)flags;
    if (!l || !n) return CUDA_ERROR_INVALID_VALUE;
    if (n > 1) return CUDA_ERROR_NOT_SUPPORTED;
    unsigned shape[] = {l->gridDimX, l->gridDimY, l->gridDimZ, l->blockDimX, l->blockDimY, l->blockDimZ, l->sharedMemBytes};
    return launch_kernel(0, 1, l->function, shape, l->hStream, l->kernelParams, NULL);
}

/* Attributes that tell more than when and with what priority blocks may start have no counterpart and are ignored. */
static CUresult launch_ex(int pt, const CUlaunchConfig *config, CUfunction f, void **params, void **extra)
{
    if (!config || (config->numAttrs && !config->attrs)) return CUDA_ERROR_INVALID_VALUE;
    launch_how how = {.config = *config, .per_thread = pt, .priority = RG_MODEL_INHERIT};
    for (unsigned i = 0; i < config->numAttrs; i++) {
        const CUlaunchAttribute *a = &config->attrs[i];
        if (a->id == CU_LAUNCH_ATTRIBUTE_PRIORITY) how.priority = a->value.priority;
        if (a->id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) how.cooperative = a->value.priority != 0; /* the union's int */
    }
    return launch(&how, f, params, extra);
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra)
{
    return launch_ex(0, config, f, params, extra);
}

API CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction f, void **params, void **extra)
{
    return launch_ex(1, config, f, params, extra);
}

/* ---- The launches of CUDA 1: shape and parameters are set on the function first. */

API CUresult cuFuncSetBlockShape(CUfunction function, int x, int y, int z)
{
    sim_object *f;
    CUresult r = enter_function(function, &f);
    if (r) return r;
    if (x <= 0 || y <= 0 || z <= 0) return CUDA_ERROR_INVALID_VALUE;
    f->function.block[0] = (unsigned)x;
    f->function.block[1] = (unsigned)y;
    f->function.block[2] = (unsigned)z;
    return CUDA_SUCCESS;
}

API CUresult cuFuncSetSharedSize(CUfunction function, unsigned bytes)
{
    sim_object *f;
    CUresult r = enter_function(function, &f);
    if (r) return r;
    f->function.shared = bytes;
    return CUDA_SUCCESS;
}

static CUresult set_param(CUfunction function, int offset, const void *value, size_t bytes)
{
    sim_object *f;
    CUresult r = enter_function(function, &f);
    if (r) return r;
    if (!value || offset < 0 || (size_t)offset + bytes > 4096) return CUDA_ERROR_INVALID_VALUE;
    /* Only the first parameters mean something to the simulator. */
    for (size_t i = 0; i < bytes && (size_t)offset + i < sizeof f->function.param; i++)
        f->function.param[(size_t)offset + i] = ((const unsigned char *)value)[i];
    return CUDA_SUCCESS;
}

API CUresult cuParamSetSize(CUfunction function, unsigned bytes)
{
    sim_object *f;
    CUresult r = enter_function(function, &f);
    return r ? r : bytes > 4096 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

API CUresult cuParamSeti(CUfunction function, int offset, unsigned value)
{
    return set_param(function, offset, &value, sizeof value);
}

API CUresult cuParamSetf(CUfunction function, int offset, float value)
{
    return set_param(function, offset, &value, sizeof value);
}

API CUresult cuParamSetv(CUfunction function, int offset, void *value, unsigned bytes)
{
    return set_param(function, offset, value, bytes);
}

static CUresult launch_old(CUfunction function, int width, int height, CUstream s)
{
    sim_object *f;
    CUresult r = enter_function(function, &f);
    if (r) return r;
    if (width <= 0 || height <= 0) return CUDA_ERROR_INVALID_VALUE;
    size_t size = sizeof f->function.param;
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, f->function.param, CU_LAUNCH_PARAM_BUFFER_SIZE, &size,
                     CU_LAUNCH_PARAM_END};
    const unsigned *b = f->function.block;
    return launch_kernel(0, 0, function,
                         (unsigned[]){(unsigned)width, (unsigned)height, 1, b[0], b[1], b[2], f->function.shared}, s,
                         NULL, extra);
}

API CUresult cuLaunch(CUfunction function)
{
    return launch_old(function, 1, 1, NULL);
}

API CUresult cuLaunchGrid(CUfunction function, int width, int height)
{
    return launch_old(function, width, height, NULL);
}

API CUresult cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream)
{
    return launch_old(function, width, height, stream);
}
