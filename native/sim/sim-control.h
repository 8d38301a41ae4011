/*
 * sim-control.h: what the simulated driver offers beyond CUDA: a process's time slices, and taking it off the GPU.
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

#endif
