/*
 * test-trace.c: the table of threads and the ring of records (trace.h), as a reader from outside sees them, at any instant.
 */
#include "client-testing.h"

#include <pthread.h>
#include <sys/mman.h>

enum { SLOT = 3, THREADS = 8, EACH = 20000 };

static void begin(void)
{
    segment_path = scratch("trace");
    seg = fresh_segment(segment_path);
    unlink(segment_path);
    rg_trace_attach(seg, SLOT);
    rg_this.left = rg_this.block = 0; /* in a ring of an earlier test */
}

static rg_thread *row_of(uint32_t tid)
{
    for (int i = 0; i < RG_MAX_THREADS; i++) {
        rg_thread *row = &seg->threads[SLOT * RG_MAX_THREADS + i];
        if (atomic_load(&row->tid) == tid)
            return row;
    }
    return NULL;
}

static uint32_t rows(void)
{
    uint32_t n = 0;
    for (int i = 0; i < RG_MAX_CLIENTS * RG_MAX_THREADS; i++)
        n += atomic_load(&seg->threads[i].tid) != 0;
    return n;
}

/* ---- the ring ---- */

/* What a reader takes: all four words of one lap. */
static bool read_record(int i, uint64_t word[RG_RECORD_WORDS])
{
    for (int w = 0; w < RG_RECORD_WORDS; w++)
        word[w] = atomic_load_explicit(&seg->traces[SLOT].records[i * RG_RECORD_WORDS + w], memory_order_relaxed);
    uint64_t lap = word[0] >> RG_RECORD_BITS;
    for (int w = 0; w < RG_RECORD_WORDS; w++) {
        if (word[w] >> RG_RECORD_BITS != lap)
            return false;
        word[w] &= RG_RECORD_MASK;
    }
    return lap != 0;
}

static _Atomic int writing;

/* Records whose words say the same in three ways, so that a mixture of two shows. */
static void *write_records(void *number)
{
    uint64_t base = (uint64_t)(uintptr_t)number << 32;
    for (uint64_t i = 0; i < EACH; i++)
        rg_record((uint32_t)((base + i) % 1000), RG_TRACE_call, 7, 0, base + i, base + i, (base + i) * 3);
    atomic_fetch_sub(&writing, 1);
    return NULL;
}

static void a_torn_record_is_told_from_a_whole_one(void)
{
    begin();
    pthread_t threads[THREADS];
    atomic_store(&writing, THREADS);
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK_EQUAL(pthread_create(&threads[i], NULL, write_records, (void *)i), 0);
    uint64_t word[RG_RECORD_WORDS], whole = 0;
    do
        for (int i = 0; i < RG_TRACE_RECORDS; i++) {
            if (!read_record(i, word))
                continue;
            whole++;
            CHECK_EQUAL(word[2], word[0]);
            CHECK_EQUAL(word[3], (word[0] * 3) & RG_RECORD_MASK);
            CHECK_EQUAL(word[1] & 1023, word[0] % 1000);
        }
    while (atomic_load(&writing));
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    CHECK(whole > 0);
    /* Of its last block a thread may have used one place; of each lap's last one, what went over the end is left out; and one that
     * did not run for a while has given some up. */
    uint64_t taken = atomic_load(&seg->clients[SLOT].records);
    CHECK(taken >= THREADS * EACH && taken < 2 * THREADS * EACH);
    int kept = 0;
    for (int i = 0; i < RG_TRACE_RECORDS; i++)
        kept += read_record(i, word);
    /* Two writers a lap apart may have met in one place; all others are whole. */
    CHECK(kept > RG_TRACE_RECORDS - THREADS);
}

/* What a writer that was killed between two of its stores leaves. */
static void a_record_half_written_is_left_out(void)
{
    begin();
    uint64_t word[RG_RECORD_WORDS];
    rg_record(1, RG_TRACE_launch, 2, 0, 3, 4, 5);
    CHECK(read_record(0, word));
    CHECK(!read_record(1, word)); /* never written */
    for (int missing = 1; missing < RG_RECORD_WORDS; missing++) {
        rg_record(1, RG_TRACE_launch, 2, 0, 3, 4, 5);
        CHECK(read_record(missing, word));
        for (int w = missing; w < RG_RECORD_WORDS; w++)
            atomic_store(&seg->traces[SLOT].records[missing * RG_RECORD_WORDS + w], 0);
        CHECK(!read_record(missing, word));
    }
}

static uint64_t lap_at(uint64_t place)
{
    return atomic_load(&seg->traces[SLOT].records[place % RG_TRACE_RECORDS * RG_RECORD_WORDS]) >> RG_RECORD_BITS;
}

static void places_are_taken_in_blocks_that_grow(void)
{
    begin();
    uint64_t taken[] = {1, 3, 3, 7, 7, 7, 7, 15};
    for (int i = 0; i < 8; i++) {
        rg_record(1, RG_TRACE_call, 7, 0, 0, 1, 1);
        CHECK_EQUAL(atomic_load(&seg->clients[SLOT].records), taken[i]);
        CHECK_EQUAL(lap_at((uint64_t)i), 1);
        CHECK_EQUAL(lap_at((uint64_t)i + 1), 0); /* not come to */
    }
    for (int i = 8; i < 63 + 5 * RG_RECORD_BLOCK; i++)
        rg_record(1, RG_TRACE_call, 7, 0, 0, 1, 1);
    CHECK_EQUAL(atomic_load(&seg->clients[SLOT].records), 63 + 5 * RG_RECORD_BLOCK);
}

/* All places of a block are of one lap: none goes over the ring's end, and the rest of it is not used. */
static void a_block_ends_with_its_lap(void)
{
    begin();
    uint64_t made = 0;
    while (atomic_load(&seg->clients[SLOT].records) < RG_TRACE_RECORDS + RG_RECORD_BLOCK) {
        rg_record(1, RG_TRACE_call, 7, 0, 0, 1, 1);
        made++;
    }
    /* 1 + 2 + 4 + 8 + 16 + 32 and blocks of 64 after that: the last one of the first lap begins one place before its end. */
    CHECK_EQUAL(lap_at(RG_TRACE_RECORDS - 1), 1);
    CHECK_EQUAL(made, RG_TRACE_RECORDS + 1);
    CHECK_EQUAL(lap_at(0), 1);
    CHECK_EQUAL(lap_at(RG_RECORD_BLOCK - 1), 2);
}

/* Whoever records so seldom that others have come far gives the rest of its places up, and takes half as many next time. */
static void places_left_far_behind_are_given_up(void)
{
    begin();
    for (int i = 0; i < 2; i++)
        rg_record(1, RG_TRACE_call, 7, 0, 0, 1, 1); /* and has one place left */
    CHECK_EQUAL(atomic_load(&seg->clients[SLOT].records), 3);
    atomic_store(&seg->clients[SLOT].records, 2 + RG_RECORD_BEHIND);
    rg_record(1, RG_TRACE_call, 7, 0, 0, 1, 1);
    CHECK_EQUAL(lap_at(2), 1);
    uint64_t others = 1100 + RG_RECORD_BEHIND;
    for (int i = 0; i < 2; i++)
        rg_record(1, RG_TRACE_call, 7, 0, 0, 1, 1);
    CHECK_EQUAL(atomic_load(&seg->clients[SLOT].records), 2 + RG_RECORD_BEHIND + 4);
    atomic_store(&seg->clients[SLOT].records, others);
    rg_record(1, RG_TRACE_call, 7, 0, 0, 1, 1);
    CHECK_EQUAL(lap_at(others), 1);
    CHECK_EQUAL(atomic_load(&seg->clients[SLOT].records), others + 2);
}

/* ---- threads ---- */

static void a_row_says_what_its_thread_is_in(void)
{
    begin();
    uint32_t me = (uint32_t)gettid();
    CHECK(row_of(me) == NULL);
    uint64_t before = rg_tick();
    rg_op outer = rg_wait_op(RG_OP_cuStreamSynchronize, 0x1234);
    rg_thread *row = row_of(me);
    CHECK(row != NULL);
    CHECK_EQUAL(atomic_load(&row->doing), RG_OP_cuStreamSynchronize | RG_DOING);
    CHECK_EQUAL(atomic_load(&row->object), 0x1234);
    CHECK(atomic_load(&row->since_tick) >= before && atomic_load(&row->since_tick) <= rg_tick());
    /* One in the other: afterwards it is in the outer one again, since it began. */
    rg_op inner = rg_op_begin(RG_OP_cuLaunchKernel, false);
    CHECK_EQUAL(atomic_load(&row->doing), RG_OP_cuLaunchKernel | RG_DOING);
    CHECK_EQUAL(atomic_load(&row->before), RG_OP_cuStreamSynchronize);
    rg_op_done(&inner, rg_op_note(&inner, RG_TRACE_launch, 0, 0), false);
    CHECK_EQUAL(atomic_load(&row->doing), RG_OP_cuStreamSynchronize | RG_DOING);
    CHECK_EQUAL(atomic_load(&row->since_tick), outer.tick);
    rg_op_end(&outer, RG_TRACE_sync, 0, 0x1234);
    CHECK_EQUAL(atomic_load(&row->doing), RG_OP_cuStreamSynchronize);
    uint64_t word[RG_RECORD_WORDS];
    CHECK(read_record(1, word) && !read_record(2, word));
    /* Nothing is recorded where that is switched off, and the row is kept all the same. */
    atomic_store(&seg->settings.trace, 0);
    rg_op more = rg_op_begin(RG_OP_cuMemAlloc_v2, true);
    CHECK_EQUAL(atomic_load(&row->doing), RG_OP_cuMemAlloc_v2 | RG_DOING);
    rg_op_end(&more, RG_TRACE_alloc, 0, 64);
    CHECK(!read_record(2, word));
    CHECK_EQUAL(atomic_load(&row->calls), 2);
}

/* What is not known before it returns is added then: that it failed, and its time, where that is worth knowing. */
static void a_launch_is_recorded_before_it_is_made(void)
{
    begin();
    uint64_t word[RG_RECORD_WORDS], after[RG_RECORD_WORDS];
    for (int failed = 0; failed < 2; failed++) {
        rg_op op = rg_op_begin(RG_OP_cuLaunchKernel, false);
        uint64_t place = rg_op_note(&op, RG_TRACE_launch, 0, 5);
        CHECK_EQUAL(place, failed);
        CHECK(read_record(failed, word));
        CHECK(word[0] == (op.tick & RG_RECORD_MASK) && word[2] == 5 && word[3] == 0 && !(word[1] & RG_RECORD_FAILED));
        CHECK_EQUAL(atomic_load(&op.row->doing), RG_OP_cuLaunchKernel | RG_DOING);
        rg_op_done(&op, place, failed);
        CHECK_EQUAL(atomic_load(&op.row->doing), RG_OP_cuLaunchKernel);
        CHECK(read_record(failed, after));
        CHECK_EQUAL(after[1], word[1] | (failed ? RG_RECORD_FAILED : 0));
        CHECK((after[3] > 0) == failed);
    }
    rg_op slow = rg_op_begin(RG_OP_cuLaunchKernel, false);
    uint64_t place = rg_op_note(&slow, RG_TRACE_launch, 0, 6);
    atomic_store(&rg_rec.beat_tick, slow.beat + 1);
    rg_op_done(&slow, place, false);
    CHECK(read_record((int)place, word) && word[3] > 0 && !(word[1] & RG_RECORD_FAILED));
    /* Others have come round to its place: what stands there is not its own any more. */
    rg_op late = rg_op_begin(RG_OP_cuLaunchKernel, false);
    place = rg_op_note(&late, RG_TRACE_launch, 0, 7);
    atomic_store(&seg->clients[SLOT].records, place + RG_TRACE_RECORDS);
    rg_op_done(&late, place, true);
    CHECK(read_record((int)place, word) && word[2] == 7 && word[3] == 0 && !(word[1] & RG_RECORD_FAILED));
    /* Nor is anything recorded where that is switched off. */
    uint64_t records = atomic_load(&seg->clients[SLOT].records);
    atomic_store(&seg->settings.trace, 0);
    rg_op off = rg_op_begin(RG_OP_cuLaunchKernel, false);
    rg_op_done(&off, rg_op_note(&off, RG_TRACE_launch, 0, 8), true);
    CHECK_EQUAL(atomic_load(&seg->clients[SLOT].records), records);
    CHECK(read_record((int)place, word) && word[2] == 7 && !(word[1] & RG_RECORD_FAILED));
}

static void *once(void *unused)
{
    rg_op op = rg_op_begin(RG_OP_cuMemFree_v2, true);
    rg_op_end(&op, RG_TRACE_free, 0, 0);
    return unused;
}

static void a_row_is_freed_with_its_thread(void)
{
    begin();
    for (int i = 0; i < 3 * RG_MAX_THREADS; i++) {
        pthread_t thread;
        CHECK_EQUAL(pthread_create(&thread, NULL, once, NULL), 0);
        pthread_join(thread, NULL);
    }
    CHECK_EQUAL(rows(), 0);
    CHECK_EQUAL(atomic_load(&seg->clients[SLOT].threads_lost), 0);
}

/* Its function returns in a child as well, which changes nothing of the parent's. */
static void *fork_and_end(void *unused)
{
    once(NULL);
    rg_thread *row = rg_this.row;
    pid_t pid = fork();
    if (pid == 0)
        return unused;
    int status;
    CHECK_EQUAL(waitpid(pid, &status, 0), pid);
    CHECK_EQUAL(status, 0);
    CHECK_EQUAL(atomic_load(&row->tid), gettid());
    rg_calls_add();
    CHECK_EQUAL(atomic_load(&seg->calls[rg_thread_slot()].count[RG_OP_cuMemFree_v2]), 1);
    return unused;
}

static void a_thread_that_ends_in_a_child_changes_nothing(void)
{
    begin();
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, fork_and_end, NULL), 0);
    pthread_join(thread, NULL);
    CHECK_EQUAL(rows(), 0);
}

/* Left by a thread that called the driver after its row was freed: taken from it once it is gone. */
static void a_row_of_a_thread_that_is_gone_is_taken(void)
{
    begin();
    for (int i = 0; i < RG_MAX_THREADS; i++)
        atomic_store(&seg->threads[SLOT * RG_MAX_THREADS + i].tid, 0x3fffff); /* above what Linux hands out */
    once(NULL);
    CHECK(row_of((uint32_t)gettid()) != NULL);
    CHECK_EQUAL(atomic_load(&seg->clients[SLOT].threads_lost), 0);
}

static pthread_barrier_t all_in, all_out;
static void *stay(void *unused)
{
    once(NULL);
    pthread_barrier_wait(&all_in);
    pthread_barrier_wait(&all_out);
    return unused;
}

static void threads_that_find_no_room_are_counted(void)
{
    enum { MORE = 5, ALL = RG_MAX_THREADS + MORE };
    begin();
    pthread_t threads[ALL];
    pthread_barrier_init(&all_in, NULL, ALL + 1);
    pthread_barrier_init(&all_out, NULL, ALL + 1);
    for (int i = 0; i < ALL; i++)
        CHECK_EQUAL(pthread_create(&threads[i], NULL, stay, NULL), 0);
    pthread_barrier_wait(&all_in);
    CHECK_EQUAL(rows(), RG_MAX_THREADS);
    CHECK_EQUAL(atomic_load(&seg->clients[SLOT].threads_lost), MORE);
    CHECK_EQUAL(atomic_load(&seg->clients[SLOT].records), ALL); /* what they do is recorded all the same */
    pthread_barrier_wait(&all_out);
    for (int i = 0; i < ALL; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQUAL(rows(), 0);
}

static void what_a_killed_process_was_in_stays(void)
{
    begin();
    pid_t pid = fork();
    if (pid == 0) {
        rg_wait_op(RG_OP_cuCtxSynchronize, 42);
        kill(getpid(), SIGKILL);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
    rg_thread *row = row_of((uint32_t)pid);
    CHECK(row != NULL);
    CHECK_EQUAL(atomic_load(&row->doing), RG_OP_cuCtxSynchronize | RG_DOING);
    CHECK_EQUAL(atomic_load(&row->object), 42);
}

/* ---- names ---- */

/* The clock by the processor's counter is the kernel's a microsecond ago, to within one; whatever comes between two looks. */
static void the_clock_by_the_counter_follows_the_kernels(void)
{
    if (!rg_processor_ticks()) {
        printf("  not done: the kernel does not keep time by the processor's counter here\n");
        return;
    }
    begin();
    rg_rec.processor = true;
    rg_clock.rate = 0;
    uint64_t before = rg_now_ns();
    uint64_t ns = rg_clock_ns() + RG_CLOCK_BEHIND_NS; /* not compared yet: the kernel's own */
    CHECK(ns >= before && ns <= rg_now_ns());
    for (int beat = 0; beat < 20 || !rg_clock.rate; beat++) {
        usleep(20000);
        rg_clock_beat();
    }
    /* The rate comes from looks 20 ms apart that last a microsecond each, and the clock may be corrected at 500 ppm: the longer after the
     * last look, the farther off. */
    for (int i = 0; i <= 1000; i++) {
        if (i == 1000)
            usleep(100000);
        before = rg_now_ns();
        ns = rg_clock_ns() + RG_CLOCK_BEHIND_NS;
        uint64_t after = rg_now_ns(), off = RG_CLOCK_BEHIND_NS + rg_since(rg_clock.ns, after) / 2000;
        CHECK(ns + off >= before && ns <= after + off);
    }
    /* While it is being written, and long after the last beat, the kernel's own counts. */
    for (int way = 0; way < 2; way++) {
        rg_clock.version += way == 0;
        uint64_t ago = way == 0 ? 0 : (2ull * RG_CLOCK_LAST_NS << 32) / rg_clock.rate;
        rg_clock.tick = rg_processor_tick() - ago;
        rg_clock.ns = 1; /* what the counter says is another time */
        before = rg_now_ns();
        ns = rg_clock_ns() + RG_CLOCK_BEHIND_NS;
        CHECK(ns >= before && ns <= rg_now_ns());
        rg_clock.version += way == 0;
    }
    CHECK_EQUAL(rg_since(5, 9), 4);
    CHECK_EQUAL(rg_since(9, 5), 0);
    rg_clock.rate = 0;
}

static void names_are_entered_once_and_cut_to_fit(void)
{
    begin();
    char longer[2 * RG_NAME_TEXT_BYTES];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = 0;
    uint32_t a = rg_name_enter("gemm"), b = rg_name_enter(longer);
    CHECK(a && b && a != b);
    CHECK_EQUAL(rg_name_enter("gemm"), a);
    CHECK(strcmp(seg->names[a - 1].name, "gemm") == 0);
    CHECK_EQUAL(strlen(seg->names[b - 1].name), RG_NAME_TEXT_BYTES - 1);
    uint32_t entered = 2, refused = 0;
    for (int i = 0; i < 2 * RG_MAX_NAMES; i++) {
        char name[32];
        snprintf(name, sizeof name, "kernel_%d", i);
        entered += rg_name_enter(name) != 0;
    }
    refused = atomic_load(&seg->header.names_lost);
    CHECK(entered <= RG_MAX_NAMES);
    CHECK(entered > RG_MAX_NAMES / 4 * 3);
    CHECK_EQUAL(entered + refused, 2 + 2 * RG_MAX_NAMES);
}

static void a_name_is_found_until_it_is_forgotten(void)
{
    const uintptr_t one = 0x7f0000001000, other = 0x7f0000002000;
    begin();
    CHECK(rg_name_entry_of(one) != rg_name_entry_of(other));
    atomic_store(rg_name_entry_of(one), rg_name_key(one) << 16 | 1);
    atomic_store(rg_name_entry_of(other), rg_name_key(other) << 16 | 2);
    CHECK(rg_name_of(false, one) == 1 && rg_name_of(false, other) == 2 && rg_name_of(false, one) == 1);
    rg_name_forget(other);
    CHECK_EQUAL(atomic_load(rg_name_entry_of(other)), 0);
    rg_name_forget(other); /* again, or by another in its place */
    CHECK_EQUAL(rg_name_of(false, one), 1);
    /* One whose place is taken has the one beside it. */
    uintptr_t third = one;
    do
        third += 16;
    while (rg_name_entry_of(third) != rg_name_entry_of(one));
    _Atomic uint64_t *beside = &rg_name_cache[(rg_name_entry_of(one) - rg_name_cache) ^ 1];
    atomic_store(beside, rg_name_key(third) << 16 | 3);
    CHECK(rg_name_of(false, third) == 3 && rg_name_of(false, one) == 1);
    rg_name_forget(third);
    CHECK(atomic_load(beside) == 0 && rg_name_of(false, one) == 1);
}

/* A slot's next process begins with nothing of the one before. */
static void a_slot_that_is_taken_again_is_empty(void)
{
    begin();
    int slot = rg_segment_claim(seg, "a", RG_CLASS_HIGH, rg_now_ns());
    atomic_store(&seg->clients[slot].owner, 0x7fffffff); /* nobody's */
    rg_trace_attach(seg, slot);
    once(NULL);
    CHECK_EQUAL(atomic_load(&seg->clients[slot].records), 1);
    CHECK_EQUAL(rg_segment_claim(seg, "a", RG_CLASS_HIGH, rg_now_ns()), slot);
    CHECK_EQUAL(atomic_load(&seg->clients[slot].records), 0);
    CHECK_EQUAL(atomic_load(&seg->traces[slot].records[0]), 0);
    CHECK_EQUAL(rows(), 0);
}

int main(void)
{
    int failures = 0;
    RUN(a_torn_record_is_told_from_a_whole_one);
    RUN(a_record_half_written_is_left_out);
    RUN(places_are_taken_in_blocks_that_grow);
    RUN(a_block_ends_with_its_lap);
    RUN(places_left_far_behind_are_given_up);
    RUN(a_row_says_what_its_thread_is_in);
    RUN(a_launch_is_recorded_before_it_is_made);
    RUN(a_row_is_freed_with_its_thread);
    RUN(a_thread_that_ends_in_a_child_changes_nothing);
    RUN(a_row_of_a_thread_that_is_gone_is_taken);
    RUN(threads_that_find_no_room_are_counted);
    RUN(what_a_killed_process_was_in_stays);
    RUN(the_clock_by_the_counter_follows_the_kernels);
    RUN(names_are_entered_once_and_cut_to_fit);
    RUN(a_name_is_found_until_it_is_forgotten);
    RUN(a_slot_that_is_taken_again_is_empty);
    return failures != 0;
}
