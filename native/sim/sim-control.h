/*
 * sim-control.h: what the simulated driver offers beyond CUDA: a process's time slices, taking it off the GPU or stopping its streams, what
 * it did and what each process has had of the GPU.
 *
 * Stands for two controls of NVIDIA's kernel driver that a process can use on its own channels without privileges: the
 * time slice of a channel group (NVA06C_CTRL_CMD_SET_TIMESLICE) and taking compute channels off the GPU in the middle
 * of a kernel (NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS). Found with dlsym in the loaded libcuda.so.1; a real driver has
 * neither name. It needs nothing else of the simulator.
 */
#ifndef RIGEL_SIM_CONTROL_H
#define RIGEL_SIM_CONTROL_H

#include <stdint.h>

/*
 * Both act on every context that the calling process has on the device at that moment; one that it makes later starts
 * with a slice of 2048 us, and not suspended. Callable from any thread, with or without a current context. 0, or
 *   -ENODEV   the process has no context on this device (also before cuInit, after fork and at the end of the process)
 *   -ENOTSUP  (after cuInit, with a context or without) the processes share the GPU as under MPS: suspending one client
 *             of the real one stalled the others
 *   -EINVAL   a slice that is not 1 to 1,000,000 us
 */

/*
 * rigelSimSetTimeslice: the length of this process's time slices, from the one in progress on. A slice ends at its
 * length only when another process has work for the GPU.
 */
int rigelSimSetTimeslice(unsigned device_ordinal, uint64_t us);

/*
 * rigelSimSuspend: with `suspend`, takes this process off the GPU: no kernel of it runs on until it calls with 0,
 * launches go on being accepted, and waits wait. A running kernel is stopped when the call returns, and goes on where
 * it was. Copies go on. Telling it what it is already changes nothing. The caller sleeps for as long as the real
 * control takes: 280 us until it takes effect and 180 us while a kernel is preempted; to resume, 230 us until it takes
 * effect. It ends with the process, however that ends.
 */
int rigelSimSuspend(unsigned device_ordinal, int suspend);

/*
 * rigelSimStop: with `stopped`, the process's streams stop as they come to a cuStreamWaitValue32 for 1 or more, until it calls with 0. It stands
 * for a store to the word, which a real GPU sees by itself, another process's, too. Also where processes share the GPU; a context made later is not
 * stopped.
 */
int rigelSimStop(unsigned device_ordinal, int stopped);

/*
 * rigelSimWrites: what cuStreamWriteValue32 was to write by now, of this process, stands in memory when it returns. It stands for looking at
 * that memory, which a real GPU writes by itself. 0, or -ENODEV.
 */
int rigelSimWrites(unsigned device_ordinal);

/* What the simulated GPU did, for a stand-in of CUPTI (cupti.c): one kernel, copy or memset. */
typedef struct {
    int what;         /* 0 kernel, 1 copy, 2 memset */
    int direction;    /* of a copy: 0 to the device, 1 to the host, 2 within the device */
    const char *name; /* of a kernel; stays as long as its module */
    uint32_t grid[3], block[3], registers, shared_bytes;
    uint64_t bytes;
    uint64_t start_ns, end_ns; /* CLOCK_MONOTONIC */
    uint32_t stream, context, device;
    uint32_t correlation; /* one for each call, growing */
    uint32_t graph, node; /* 0: launched on its own */
} rigel_sim_activity;

/*
 * rigelSimTrace: whether what this process submits from now on is traced. rigelSimTraced: the next thing that has finished, in the
 * order of submission; 0 where there is none (yet). A start is when the stream came to it. Graphs are submitted node by node
 * meanwhile. rigelSimTraceLost: submitted and not traced, for want of room, since tracing began.
 */
void rigelSimTrace(int on);
int rigelSimTraced(rigel_sim_activity *activity);
uint64_t rigelSimTraceLost(void);

/* For how long a process has kept a simulated GPU busy since it came. */
typedef struct {
    unsigned char uuid[16]; /* of the GPU */
    uint64_t pid;
    uint64_t busy_ns;
} rigel_sim_busy;

/*
 * rigelSimBusy: for how long each process on the GPUs of a state file (RIGEL_SIM_STATE) has kept each of them busy, as NVML's smUtil
 * tells it of a real one: while at least one block of a kernel of it ran, not while it was off the SMs; the sum over its contexts, so that
 * several at once, under MPS, count several times. Copies do not count. For whoever looks on: needs no cuInit, and is no process on
 * the GPU. Brings the GPUs up to *at_ns, their present, which of a virtual clock it does not move.
 *
 * Writes as many entries as fit into `bytes`. How many there are, or
 *   -errno    the file cannot be opened
 *   -EINVAL   it is no state file of this user and version, or not whole yet
 */
int rigelSimBusy(const char *path, rigel_sim_busy *out, uint64_t bytes, uint64_t *at_ns);

/* What the state file of so many GPUs takes. */
uint64_t rigelSimStateBytes(uint32_t devices);

#endif
