/*
 * record-client.h: the recording (record.c, cupti.c) as the other parts of librigel.so see it.
 *
 * All but rg_record_attach, _stop and _forget_context are called only in a process that records: rg.mode has
 * RG_MODE_RECORDED, or rg_recorded is not NULL.
 */
#ifndef RIGEL_RECORD_CLIENT_H
#define RIGEL_RECORD_CLIENT_H

#include "client.h"
#include "record.h"

/* The recording of this process; NULL: none. Set while it becomes a client, and never again. */
extern rg_recording *rg_recorded;

/* rg_record_attach: opens RIGEL_RECORD; called once while the process becomes a client. Whether this process records. */
bool rg_record_attach(void);

/* rg_record_stop: what was timed so far goes into the ring; bounded. */
void rg_record_stop(void);

/* What is launched. */
typedef struct {
    enum rg_kind kind;
    CUstream stream;
    uintptr_t units; /* as in hooks.def */
    rg_dims dims;
    uint32_t shared_bytes; /* dynamic */
    const char *call;      /* the driver's name of it */
} rg_record_what;

/* rg_record_begin, rg_record_end: round the driver's call, in its thread. `ok`: it went out. */
void rg_record_begin(const rg_record_what *what);
void rg_record_end(const rg_record_what *what, bool ok);

/* rg_record_request: a request has ended. WAITED becomes IDLE where the agent saw it. */
void rg_record_request(enum rg_record_source source, uint64_t at_ns, uint64_t latency_ns);

/* rg_record_wait_begin, rg_record_wait_end: round a call that blocks until the GPU is done. */
uint64_t rg_record_wait_begin(void);
void rg_record_wait_end(uint64_t begin_ns);

/* A matrix product that cuBLAS is asked for: m x n x k, so many of them. */
typedef struct {
    int64_t m, n, k, batch;
    int type; /* cudaDataType of its operands */
} rg_record_gemm;

/* rg_record_gemm_begin, rg_record_gemm_end: round cuBLAS's function: what is launched between them belongs to it. */
uint64_t rg_record_gemm_begin(const rg_record_gemm *gemm);
void rg_record_gemm_end(uint64_t before);

/* rg_record_graph: an executable graph was made. */
void rg_record_graph(CUgraphExec exec, CUgraph graph);

/* rg_record_functions_forget: the driver may give handles of kernels out again from now on. */
void rg_record_functions_forget(void);

/* rg_record_forget_context: the context (or every context of device `d`) goes, and its events with it. */
void rg_record_forget_context(CUcontext context, CUdevice d);

/* ---- cupti.c ---- */

/* rg_cupti_start: finds CUPTI and takes its activity interface, unless somebody else has it; false and the reason. */
bool rg_cupti_start(char *why, size_t why_bytes);

/* rg_cupti_on, rg_cupti_off: records are made from here on; no longer, and all there are have come. rg_cupti_poll: takes those that
 * are there. Recording thread only. */
bool rg_cupti_on(void);
void rg_cupti_off(void);
void rg_cupti_poll(void);

#endif
