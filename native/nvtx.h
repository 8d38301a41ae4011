/*
 * nvtx.h: NVTX ranges, on request: nvtx.c.
 */
#ifndef RIGEL_NVTX_H
#define RIGEL_NVTX_H

/* rg_nvtx_attach: has a tool told of ranges from now on, where both the user and the tool want that. After every cuInit of a client. */
void rg_nvtx_attach(void);

#endif
