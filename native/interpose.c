/*
 * interpose.c: how a program's look-ups of driver functions come to Rigel's hooks.
 *
 * Three ways lead into libcuda, and each is covered:
 *   - a program linked against libcuda binds to the names this library exports (hooks.c), because it is preloaded;
 *   - dlsym (libcudart, cuBLAS, Triton, CuPy): exported here, see below;
 *   - cuGetProcAddress: its hooks in hooks.c replace what the real one returns.
 * The last two replace by returned pointer: whatever version or per-thread-stream form the driver chose, if it is one of the
 * functions in hooks.def, the hook of exactly that function is handed out; everything else is handed out untouched.
 *
 * dlsym must reach the real one by a jump, not a call: glibc resolves RTLD_NEXT relative to its caller, so a call would
 * resolve relative to this library and, with a second preloaded dlsym, recurse. `make` checks the jump in the object code.
 *
 * The names of cuBLAS (cublas.def) and NCCL (nccl.def) are treated alike, except that library.c finds the real ones and answers for
 * them.
 *
 * Must never: call the driver, or do anything but look up names in a process that is no client (RIGEL_SEGMENT unset or RIGEL_DISABLE=1).
 */
#include "collective.h"
#include "guard.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

rg_driver rg_real;

#define RG_WORK(symbol, ...) #symbol,
#define RG_SPECIAL(symbol, ...) #symbol,
static const char *const hook_names[RG_HOOK_COUNT] = {
#include "hooks.def"
};
#undef RG_WORK
#undef RG_SPECIAL
#define RG_WORK(symbol, ...) (void *)symbol,
#define RG_SPECIAL(symbol, ...) (void *)symbol,
static void *const hook_functions[RG_HOOK_COUNT] = {
#include "hooks.def"
};
#undef RG_WORK
#undef RG_SPECIAL

/* Read by the assembly below. */
__attribute__((visibility("hidden"))) void *(*rg_real_dlsym)(void *, const char *);
__attribute__((visibility("hidden"))) void *rg_dlsym_target(void *handle, const char *name);

#if defined(__x86_64__)
#define LIBC_BASE_VERSION "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define LIBC_BASE_VERSION "GLIBC_2.17"
#else
#error "the dlsym trampoline is written for x86-64 and aarch64"
#endif

/* RIGEL_LINKED: the parts linked into a test program, which calls the hooks by name and keeps its own dlsym. */
#ifndef RIGEL_LINKED
#if defined(__x86_64__)
__asm__(".text\n"
        ".globl dlsym\n"
        ".type dlsym, @function\n"
        "dlsym:\n"
        "    .cfi_startproc\n"
        "    endbr64\n"
        "    pushq %rdi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    pushq %rsi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    subq $8, %rsp\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    call rg_dlsym_target\n"
        "    addq $8, %rsp\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    popq %rsi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    popq %rdi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    testq %rax, %rax\n"
        "    jnz 1f\n"
        "    movq rg_real_dlsym(%rip), %r11\n"
        "    jmp *%r11\n"
        "1:  cmpq $1, %rax\n"
        "    jne 2f\n"
        "    xorl %eax, %eax\n"
        "2:  ret\n"
        "    .cfi_endproc\n"
        ".size dlsym, .-dlsym\n");
#elif defined(__aarch64__)
__asm__(".text\n"
        ".globl dlsym\n"
        ".type dlsym, %function\n"
        "dlsym:\n"
        "    .cfi_startproc\n"
        "    stp x29, x30, [sp, #-32]!\n"
        "    .cfi_adjust_cfa_offset 32\n"
        "    .cfi_rel_offset x29, 0\n"
        "    .cfi_rel_offset x30, 8\n"
        "    mov x29, sp\n"
        "    stp x0, x1, [sp, #16]\n"
        "    bl rg_dlsym_target\n"
        "    mov x9, x0\n"
        "    ldp x0, x1, [sp, #16]\n"
        "    ldp x29, x30, [sp], #32\n"
        "    .cfi_adjust_cfa_offset -32\n"
        "    .cfi_restore x29\n"
        "    .cfi_restore x30\n"
        "    cbnz x9, 1f\n"
        "    adrp x16, rg_real_dlsym\n"
        "    ldr x16, [x16, #:lo12:rg_real_dlsym]\n"
        "    br x16\n"
        "1:  cmp x9, #1\n"
        "    csel x0, xzr, x9, eq\n"
        "    ret\n"
        "    .cfi_endproc\n"
        ".size dlsym, .-dlsym\n");
#endif
#endif

static void *real_dlsym(void *handle, const char *name)
{
    if (!rg_real_dlsym)
        rg_real_dlsym = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", LIBC_BASE_VERSION);
    return rg_real_dlsym(handle, name);
}

void *rg_look_up(void *handle, const char *name)
{
    return real_dlsym(handle, name);
}

/* Whether this process may become a client at all; 0 not looked at yet, 1 no, 2 yes. */
bool rg_interposing(void)
{
    static _Atomic int known;
    int k = atomic_load_explicit(&known, memory_order_relaxed);
    if (!k) {
        const char *segment = getenv("RIGEL_SEGMENT"), *disable = getenv("RIGEL_DISABLE");
        k = segment && *segment && !(disable && *disable && strcmp(disable, "0") != 0) ? 2 : 1;
        atomic_store_explicit(&known, k, memory_order_relaxed);
    }
    return k == 2;
}

static pthread_mutex_t fill_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic bool filled;

/* Fills rg_real from the library behind `handle`; false if that is no driver. Look-ups take the loader's lock, which a thread
 * in dlopen holds while constructors run, so none is made under ours. */
static bool fill(void *handle)
{
    void *init = real_dlsym(handle, "cuInit");
    if (!init || init == hook_functions[RG_HOOK_cuInit])
        return atomic_load(&filled);
    rg_driver found;
    for (int i = 0; i < RG_HOOK_COUNT; i++)
        found.hooked[i] = real_dlsym(handle, hook_names[i]);
#define RG_PLAIN(symbol, params) *(void **)&found.symbol = real_dlsym(handle, #symbol);
    RG_PLAIN_FUNCTIONS(RG_PLAIN)
#undef RG_PLAIN
#define RG_SIMULATED(symbol, params) *(void **)&found.symbol = real_dlsym(handle, #symbol);
    RG_SIMULATOR_FUNCTIONS(RG_SIMULATED)
#undef RG_SIMULATED
    dlerror(); /* what was not found is not the program's concern */
    pthread_mutex_lock(&fill_lock);
    if (!atomic_load(&filled)) {
        rg_real = found;
        atomic_store(&filled, true);
    }
    pthread_mutex_unlock(&fill_lock);
    return true;
}

bool rg_real_ready(void)
{
    if (atomic_load_explicit(&filled, memory_order_acquire))
        return true;
    /* A program linked against libcuda has it in the global scope behind us; others have opened it, or do so now. */
    void *handle = rg_library_of(real_dlsym(RTLD_NEXT, "cuInit"));
    if (!handle)
        handle = dlopen("libcuda.so.1", RTLD_NOW);
    return handle && fill(handle);
}

__attribute__((noinline, cold)) bool rg_real_late(enum rg_hook hook)
{
    return rg_real_ready() && rg_real.hooked[hook];
}

void *rg_replace(void *real)
{
    if (!real || !rg_interposing() || !atomic_load_explicit(&filled, memory_order_acquire))
        return NULL;
    for (int i = 0; i < RG_HOOK_COUNT; i++)
        if (rg_real.hooked[i] == real)
            return hook_functions[i];
    return NULL;
}

#define NOT_FOUND ((void *)1) /* the assembly makes NULL of it */

/* What dlsym should answer, or NULL to let the real one answer as if we were not there. */
void *rg_dlsym_target(void *handle, const char *name)
{
    if (!rg_real_dlsym)
        rg_real_dlsym = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", LIBC_BASE_VERSION);
    void *answer;
    if (name && strncmp(name, "cublas", 6) == 0)
        return !rg_library_look_up(&rg_cublas, handle, name, rg_interposing(), &answer) ? NULL : answer ? answer : NOT_FOUND;
    if (name && strncmp(name, "nccl", 4) == 0)
        return !rg_library_look_up(&rg_nccl, handle, name, rg_interposing(), &answer) ? NULL : answer ? answer : NOT_FOUND;
    if (!name || name[0] != 'c' || name[1] != 'u' || handle == RTLD_NEXT || handle == RTLD_DEFAULT || !rg_interposing())
        return NULL;
    int hook = -1;
    for (int i = 0; i < RG_HOOK_COUNT && hook < 0; i++)
        if (strcmp(name, hook_names[i]) == 0)
            hook = i;
    if (hook < 0)
        return NULL;
    void *real = rg_real_dlsym(handle, name);
    if (!real || real == hook_functions[hook])
        return NULL;
    if (!atomic_load_explicit(&filled, memory_order_acquire)) {
        void *owner = rg_library_of(real);
        if (!owner || !fill(owner))
            return NULL;
    }
    return rg_replace(real);
}

#ifndef RIGEL_LINKED
/*
 * ioctl: shows channel.c what this process asks the driver for; the call itself is the real one's. One test for every other
 * ioctl of the program.
 */
static int (*real_ioctl)(int, unsigned long, ...);

/* Before main: the first ioctl may be a signal handler's, where no look-up may be made. Nothing else happens in a constructor. */
__attribute__((constructor)) static void find_ioctl(void)
{
    *(void **)&real_ioctl = real_dlsym(RTLD_NEXT, "ioctl");
}

__attribute__((visibility("default"))) int ioctl(int fd, unsigned long request, ...)
{
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    int result = real_ioctl ? real_ioctl(fd, request, argument) : (int)syscall(SYS_ioctl, fd, request, argument);
    if (result == 0 && (request >> 8 & 0xff) == 'F' && rg_interposing())
        rg_channel_saw(fd, request, argument);
    return result;
}
#endif
