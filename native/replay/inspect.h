/*
 * inspect.h: what the CUDA driver of this machine says of itself, for `rigel doctor`.
 */
#ifndef RIGEL_REPLAY_INSPECT_H
#define RIGEL_REPLAY_INSPECT_H

/*
 * rg_inspect: prints one JSON object on standard output and returns 0, whatever is wrong with the driver:
 *   {"glibc":"2.36","library":path or null,"load_error":text or null,"cuda_version":13000 (0: not known),
 *    "init_error":code of cuInit (0: none),"init_error_name":name or null,"simulated":bool,
 *    "devices":[{"compute_mode":0 default, 2 prohibited, 3 one process}]}
 */
int rg_inspect(void);

/* rg_print_json: prints a text on standard output as JSON does, with its quotes; null for NULL. */
void rg_print_json(const char *text);

#endif
