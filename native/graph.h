/*
 * graph.h: executable graphs made of the parts of a graph (graph-cut.c), for graph.c, which says why and launches them; and what that has
 * for graph-cut.c.
 */
#ifndef RIGEL_GRAPH_H
#define RIGEL_GRAPH_H

#include "client.h"

typedef struct {
    CUgraphExec *execs; /* in the order in which they are to be launched */
    uint32_t count;     /* 0: there are none */
} rg_pieces;

/*
 * rg_pieces_make: cuts a graph into executable graphs of about `piece_ns` each, the whole being known to last `total_ns`. What is
 * known of their durations is entered for each. `graph` goes, whatever comes of it. RG_WHOLE_NONE, or why there are no pieces. The
 * context of the track, where they are to be launched, is current, and the thread in relaxed capture mode.
 */
enum rg_whole rg_pieces_make(rg_pieces *pieces, CUgraph graph, unsigned long long flags, const rg_track *track,
                             uint64_t total_ns, uint64_t piece_ns);

/* rg_pieces_drop: gives them back; what is running runs on. `gone`: they went with their context. */
void rg_pieces_drop(rg_pieces *pieces, bool gone);

/* rg_pieces_guess: what the durations of the graph's kernels add up to, in ns; 0 if one is not known. */
uint32_t rg_pieces_guess(CUgraph graph, const rg_track *track);

/* rg_graph_unknown: an executable graph that had this handle has gone, perhaps with its context, and nothing is known of it any more. */
void rg_graph_unknown(CUgraphExec exec);

#endif
