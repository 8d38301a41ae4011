/*
 * account.h: device memory of one client, added up over its processes, and its limit.
 *
 * A client is all processes of one name, and its limit is for their sum. What each process holds is one word of its slot
 * (rg_client.memory_bytes), written by that process alone; the sum over the account's live slots is what is in use. So
 * nothing has to be put right when a process is killed, at whatever instant: once its slot is reaped, or taken over, its
 * share is gone. A second word with the sum would be quicker to read, and wrong after the first kill between two writes.
 *
 * Comparing with the limit and adding are made one step by a lock in the account that holds its owner's process. A lock whose
 * owner has died is taken from it; one whose owner was stopped is waited for 100 ms at most.
 */
#ifndef RIGEL_ACCOUNT_H
#define RIGEL_ACCOUNT_H

#include "segment.h"

#include <stdbool.h>

/*
 * rg_account_join: the account of this name, with the slot in it and in no other; entered if new. Called by the slot's own
 * process before it charges anything. NULL when there are as many accounts as fit.
 * Also ends what this process was before an exec: its device memory has gone with its old program.
 */
rg_account *rg_account_join(rg_segment *seg, int slot, const char *name);

/* rg_account_enter: the account of this name, entered if new; no slot belongs to it for that. NULL as above. */
rg_account *rg_account_enter(rg_segment *seg, const char *name);

/* rg_account_leave: the slot is in no account any more, whoever had it before. */
void rg_account_leave(rg_segment *seg, int slot);

/* rg_account_class: the class that a client of this name is to be of, who was started as one of `class`. */
uint32_t rg_account_class(rg_segment *seg, const char *name, uint32_t class);

/* rg_account_alone: whether no process of the client lives but that of the slot. */
bool rg_account_alone(rg_segment *seg, const rg_account *account, int slot);

/* rg_account_used: bytes in use by the client. */
uint64_t rg_account_used(rg_segment *seg, rg_account *account);

/*
 * rg_account_charge: adds `bytes` to what the slot's process holds, unless the client would exceed its limit: then false, and
 * nothing has changed but the count of refusals.
 */
bool rg_account_charge(rg_segment *seg, rg_account *account, int slot, uint64_t bytes);

/* rg_account_add: adds `bytes` whatever the limit. */
void rg_account_add(rg_segment *seg, int slot, uint64_t bytes);

/* rg_account_return: takes off what was charged or added. */
void rg_account_return(rg_segment *seg, int slot, uint64_t bytes);

/* rg_account_note_peak: what is in use now may be the most so far. */
void rg_account_note_peak(rg_segment *seg, rg_account *account);

#endif
