/*
 * nvtx.c: NVTX ranges round every operation of a client (trace.h), for tools that show them, where RIGEL_NVTX is 1.
 *
 * A range has the operation's name: a call of the driver (cuLaunchKernel), a collective of NCCL, a wait at the gate (wait_high). Loads
 * no NVTX: it does what NVTX's headers do in a program that uses them (github.com/NVIDIA/NVTX, release 3,
 * c/include/nvtx3/nvtxDetail: nvtxInit.h, nvtxImpl.h, nvtxTypes.h). The tool's library, which NVTX_INJECTION64_PATH names, is
 * loaded, and its InitializeInjectionNvtx2 given a function that hands out tables; into these it writes what it wants to be called.
 * Where there is no tool, or it does not want ranges, nothing is called.
 */
#include "nvtx.h"

#include "client.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { RG_NVTX_ETID_CALLBACKS = 1, RG_NVTX_ETID_VERSIONINFO = 3 };
/* Modules, and how many functions each has, the unused first included. */
enum { RG_NVTX_CORE = 1, RG_NVTX_MODULES = 7, RG_NVTX_MOST = 16 };
static const unsigned functions_of[RG_NVTX_MODULES] = {0, 16, 9, 15, 7, 16, 7};
/* Of the core module. */
enum { RG_NVTX_RANGE_PUSH_A = 9, RG_NVTX_RANGE_POP = 11 };
/* NVTX_VERSION: of the interface, 3 since NVTX v3. */
enum { RG_NVTX_VERSION = 3 };

typedef void (*rg_nvtx_function)(void);

static rg_nvtx_function written[RG_NVTX_MODULES][RG_NVTX_MOST];
static rg_nvtx_function *tables[RG_NVTX_MODULES][RG_NVTX_MOST + 1];

static int function_table(int module, rg_nvtx_function ***table, unsigned *size)
{
    if (module < RG_NVTX_CORE || module >= RG_NVTX_MODULES)
        return 0;
    for (unsigned i = 1; i < functions_of[module]; i++)
        tables[module][i] = &written[module][i];
    if (size)
        *size = functions_of[module];
    if (table)
        *table = tables[module];
    return 1;
}

static void tool_version(uint32_t version)
{
    (void)version;
}

static const void *export_table(uint32_t id)
{
    static const struct {
        size_t size;
        int (*get)(int, rg_nvtx_function ***, unsigned *);
    } callbacks = {sizeof callbacks, function_table};
    static const struct {
        size_t size;
        uint32_t version, reserved;
        void (*set)(uint32_t);
    } version = {sizeof version, RG_NVTX_VERSION, 0, tool_version};
    return id == RG_NVTX_ETID_CALLBACKS ? (const void *)&callbacks : id == RG_NVTX_ETID_VERSIONINFO ? &version : NULL;
}

static int (*push)(const char *);
static int (*pop)(void);

void rg_nvtx_push(uint32_t operation)
{
    push(rg_op_names[operation]);
}

void rg_nvtx_pop(void)
{
    pop();
}

void rg_nvtx_attach(void)
{
    static _Atomic bool asked; /* the tool may call the driver, which comes here again */
    const char *wanted = getenv("RIGEL_NVTX"), *path = getenv("NVTX_INJECTION64_PATH");
    if (atomic_load(&rg.mode) == RG_MODE_BARE || !wanted || strcmp(wanted, "1") != 0 || atomic_exchange(&asked, true))
        return;
    if (!path || !*path) {
        rg_say("rigel: RIGEL_NVTX is 1, but no tool listens (NVTX_INJECTION64_PATH is not set); running without ranges");
        return;
    }
    void *tool = dlopen(path, RTLD_LAZY);
    int (*initialize)(const void *(*)(uint32_t)) = NULL;
    if (tool)
        *(void **)&initialize = rg_look_up(tool, "InitializeInjectionNvtx2");
    if (!initialize || !initialize(export_table)) {
        rg_say("rigel: %s (NVTX_INJECTION64_PATH) %s; running without NVTX ranges", path,
               initialize ? "has refused" : tool ? "is no tool for NVTX" : "cannot be loaded");
        return;
    }
    push = (int (*)(const char *))(void *)written[RG_NVTX_CORE][RG_NVTX_RANGE_PUSH_A];
    pop = (int (*)(void))(void *)written[RG_NVTX_CORE][RG_NVTX_RANGE_POP];
    if (!push || !pop)
        return;
    atomic_store_explicit(&rg_rec.ranges, true, memory_order_release);
    rg_changed();
}
