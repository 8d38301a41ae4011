/* test-sim-graphs.c: the simulated libcuda.so.1: stream capture and graphs. */
#include "sim-testing.h"

/* ---- Capture and graphs */

static int status_of(CUstream s)
{
    CUstreamCaptureStatus status = (CUstreamCaptureStatus)-1;
    OK(cuStreamIsCapturing(s, &status));
    return (int)status;
}

/* Ends a capture that is lost. */
static void end_lost(CUstream s)
{
    CUgraph g = (CUgraph)1;
    EQUAL(status_of(s), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    EQUAL(launch(1, 1, s), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    EQUAL(cuStreamEndCapture(s, &g), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    TRUE(!g);
    EQUAL(status_of(s), CU_STREAM_CAPTURE_STATUS_NONE);
    OK(launch(1, 1, s));
    OK(cuStreamSynchronize(s));
}

static void test_graphs(void)
{
    start();
    CUstream s = stream(1, -2), t = stream(1, 0);
    CUdeviceptr a, b;
    CUgraph g;
    CUgraphExec exec;
    unsigned char host[100], back[100];
    OK(cuMemAlloc_v2(&a, 100));
    OK(cuMemAlloc_v2(&b, 100));
    /* Nothing of what is captured happens before the graph is launched; then copies see the data of that moment. */
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EQUAL(status_of(s), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    EQUAL(status_of(t), CU_STREAM_CAPTURE_STATUS_NONE);
    OK(cuMemcpyHtoDAsync_v2(a, host, 100, s));
    OK(launch(3, 1000, s));
    OK(cuMemcpyDtoDAsync_v2(b, a, 100, s));
    OK(cuMemsetD8Async(b, 1, 10, s));
    OK(cuMemcpyDtoHAsync_v2(back, b, 100, s));
    CUstreamCaptureStatus status;
    uint64_t id = 0;
    CUgraph capturing;
    const CUgraphNode *last;
    size_t count = 0;
    OK(cuStreamGetCaptureInfo_v2(s, &status, &id, &capturing, &last, &count));
    TRUE(id && count == 1 && *last);
    EQUAL(cuGraphDestroy(capturing), CUDA_ERROR_INVALID_VALUE);
    OK(cuStreamEndCapture(s, &g));
    TRUE(g == capturing);
    EQUAL(status_of(s), CU_STREAM_CAPTURE_STATUS_NONE);
    CUgraphNode nodes[8];
    OK(cuGraphGetNodes(g, NULL, &count));
    EQUAL(count, 5);
    count = 8;
    OK(cuGraphGetNodes(g, nodes, &count));
    EQUAL(count, 5);
    const int kinds[] = {CU_GRAPH_NODE_TYPE_MEMCPY, CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEMCPY,
                         CU_GRAPH_NODE_TYPE_MEMSET, CU_GRAPH_NODE_TYPE_MEMCPY};
    for (size_t i = 0; i < count; i++) {
        int kind;
        OK(cuGraphNodeGetType(nodes[i], &kind));
        EQUAL(kind, kinds[i]);
    }
    CUDA_KERNEL_NODE_PARAMS params;
    OK(cuGraphKernelNodeGetParams_v2(nodes[1], &params));
    TRUE(params.func == spin && params.gridDimX == 3 && params.blockDimX == 1024);
    EQUAL(cuGraphKernelNodeGetParams_v2(nodes[0], &params), CUDA_ERROR_INVALID_VALUE);
    OK(cuGraphInstantiateWithFlags(&exec, g, 0));
    for (int round = 1; round <= 3; round++) {
        memset(host, round * 16, sizeof host);
        memset(back, 0, sizeof back);
        OK(cuGraphLaunch(exec, t));
        OK(cuStreamSynchronize(t));
        for (size_t i = 0; i < 100; i++) EQUAL(back[i], i < 10 ? 1 : round * 16);
    }
    /* More nodes for the same graph. */
    OK(cuStreamBeginCaptureToGraph(s, g, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(launch(1, 1, s));
    OK(cuStreamEndCapture(s, &capturing));
    TRUE(g == capturing);
    OK(cuGraphGetNodes(g, NULL, &count));
    EQUAL(count, 6);
    OK(cuGraphDestroy(g));
    EQUAL(cuGraphDestroy(g), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuGraphNodeGetType(nodes[0], (int *)&count), CUDA_ERROR_INVALID_VALUE);
    /* A graph is one operation of its stream: an hour-long node keeps what follows back, other streams run. */
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(launch(1, AN_HOUR, s));
    OK(cuStreamEndCapture(s, &g));
    CUgraphExec hour;
    OK(cuGraphInstantiateWithFlags(&hour, g, 0));
    OK(cuGraphLaunch(hour, s));
    EQUAL(cuStreamQuery(s), CUDA_ERROR_NOT_READY);
    OK(cuGraphLaunch(exec, t));
    OK(cuStreamSynchronize(t));
    OK(cuGraphExecDestroy(hour)); /* while it runs */
    EQUAL(cuGraphLaunch(hour, t), CUDA_ERROR_INVALID_VALUE);
    EQUAL(cuStreamQuery(s), CUDA_ERROR_NOT_READY);
    OK(cuGraphExecDestroy(exec));
    OK(cuGraphCreate(&g, 0));
    OK(cuGraphInstantiateWithFlags(&exec, g, 0));
    OK(cuGraphLaunch(exec, t)); /* empty */
    OK(cuStreamSynchronize(t));
    OK(cuDevicePrimaryCtxReset_v2(0));
}

static void *query_elsewhere(void *e)
{
    return (void *)(intptr_t)cuEventQuery(e);
}

static void *end_elsewhere(void *s)
{
    CUgraph g;
    return (void *)(intptr_t)cuStreamEndCapture(s, &g);
}

static CUresult in_thread(void *(*function)(void *), void *argument)
{
    pthread_t t;
    void *result;
    pthread_create(&t, NULL, function, argument);
    pthread_join(t, &result);
    return (CUresult)(intptr_t)result;
}

static void test_capture_errors(void)
{
    start();
    CUstream s = stream(1, 0), t = stream(1, 0), u = stream(1, 0), blocking = stream(0, 0);
    CUevent fork = event(), join = event(), plain = event(), unused = event();
    CUgraph g;
    CUdeviceptr p;
    OK(cuEventRecord(plain, t));
    EQUAL(cuStreamEndCapture(s, &g), CUDA_ERROR_ILLEGAL_STATE);
    EQUAL(cuStreamBeginCapture_v2(NULL, 0), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    EQUAL(cuStreamBeginCapture_v2(s, 3), CUDA_ERROR_INVALID_VALUE);
    OK(cuStreamBeginCapture_v2(s, 0));
    EQUAL(cuStreamBeginCapture_v2(s, 0), CUDA_ERROR_ILLEGAL_STATE);
    OK(cuStreamEndCapture(s, &g));
    OK(cuGraphDestroy(g));
    /* The stream itself must not be queried or waited for, nor its context. */
    OK(cuStreamBeginCapture_v2(s, 0));
    EQUAL(cuStreamQuery(s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    end_lost(s);
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
    EQUAL(cuStreamSynchronize(s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    end_lost(s);
    OK(cuStreamBeginCapture_v2(s, 0));
    EQUAL(cuCtxSynchronize(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    end_lost(s);
    /* Calls that are unsafe during a capture: of this thread, or of another one in global mode. */
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    EQUAL(cuEventQuery(plain), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    end_lost(s);
    OK(cuStreamBeginCapture_v2(s, 0));
    EQUAL(cuMemAlloc_v2(&p, 8), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    end_lost(s);
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    OK(in_thread(query_elsewhere, plain));
    EQUAL(status_of(s), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    OK(cuStreamEndCapture(s, &g));
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EQUAL(in_thread(query_elsewhere, plain), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    end_lost(s);
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuMemAlloc_v2(&p, 8));
    OK(cuEventQuery(plain));
    OK(cuStreamEndCapture(s, &g));
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    OK(cuThreadExchangeStreamCaptureMode(&mode));
    EQUAL(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cuMemFree_v2(0));
    OK(cuEventQuery(plain)); /* allowed: the thread said so */
    OK(cuStreamEndCapture(s, &g));
    OK(cuThreadExchangeStreamCaptureMode(&mode));
    mode = (CUstreamCaptureMode)7;
    EQUAL(cuThreadExchangeStreamCaptureMode(&mode), CUDA_ERROR_INVALID_VALUE);
    /* Ended by another thread, or on another stream. */
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    EQUAL(in_thread(end_elsewhere, s), CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    OK(cuStreamEndCapture(s, &g));
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(in_thread(end_elsewhere, s));
    /* Another stream joins by waiting for an event of the capture, and must be joined in turn. */
    OK(cuStreamBeginCapture_v2(s, 0));
    OK(launch(1, 1, s));
    OK(cuEventRecord(fork, s));
    EQUAL(cuEventQuery(fork), CUDA_ERROR_CAPTURED_EVENT);
    EQUAL(cuEventSynchronize(fork), CUDA_ERROR_CAPTURED_EVENT);
    EQUAL(status_of(s), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    OK(cuStreamWaitEvent(t, fork, 0));
    OK(cuStreamWaitEvent(t, unused, 0)); /* never recorded: nothing */
    EQUAL(status_of(t), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    OK(launch(1, 1, t));
    OK(cuEventRecord(join, t));
    OK(cuStreamWaitEvent(s, join, 0));
    OK(cuStreamEndCapture(s, &g));
    EQUAL(status_of(t), CU_STREAM_CAPTURE_STATUS_NONE);
    size_t count;
    OK(cuGraphGetNodes(g, NULL, &count));
    EQUAL(count, 2);
    EQUAL(cuEventQuery(join), CUDA_ERROR_CAPTURED_EVENT); /* until it is recorded again */
    OK(cuEventRecord(join, t));
    OK(cuEventSynchronize(join));
    OK(cuStreamBeginCapture_v2(s, 0));
    OK(cuEventRecord(fork, s));
    OK(cuStreamWaitEvent(t, fork, 0));
    OK(launch(1, 1, t));
    EQUAL(cuStreamEndCapture(s, &g), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    TRUE(!g && status_of(t) == CU_STREAM_CAPTURE_STATUS_NONE);
    OK(cuStreamBeginCapture_v2(s, 0));
    OK(cuEventRecord(fork, s));
    OK(cuStreamWaitEvent(t, fork, 0));
    EQUAL(cuStreamEndCapture(t, &g), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    end_lost(s);
    /* Work from outside, and two captures that would become one. */
    OK(cuStreamBeginCapture_v2(s, 0));
    EQUAL(cuStreamWaitEvent(s, join, 0), CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    end_lost(s);
    OK(cuStreamBeginCapture_v2(s, 0));
    OK(cuStreamBeginCapture_v2(u, 0));
    OK(cuEventRecord(fork, s));
    EQUAL(cuStreamWaitEvent(u, fork, 0), CUDA_ERROR_STREAM_CAPTURE_MERGE);
    end_lost(s);
    end_lost(u);
    /* A blocking stream's capture and the legacy stream do not go together; a non-blocking one's does. */
    CUstreamCaptureStatus status;
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(launch(1, 1, NULL));
    OK(cuStreamEndCapture(s, &g));
    OK(cuStreamBeginCapture_v2(blocking, CU_STREAM_CAPTURE_MODE_RELAXED));
    EQUAL(cuStreamIsCapturing(NULL, &status), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    EQUAL(status_of(blocking), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    EQUAL(launch(1, 1, NULL), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    end_lost(blocking);
    OK(cuStreamBeginCapture_v2(blocking, 0));
    EQUAL(cuMemsetD8_v2(p, 0, 8), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    end_lost(blocking);
    /* What has no node. */
    OK(cuStreamBeginCapture_v2(s, 0));
    EQUAL(cuMemAllocAsync(&p, 8, s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    end_lost(s);
    /* The per-thread stream can be captured. A stream that is destroyed takes its capture with it. */
    OK(cuStreamBeginCapture_v2_ptsz(NULL, 0));
    OK(launch(1, 1, CU_STREAM_PER_THREAD));
    OK(cuStreamEndCapture_ptsz(NULL, &g));
    OK(cuStreamBeginCapture_v2(u, 0));
    OK(cuStreamDestroy_v2(u));
    OK(cuCtxSynchronize());
}

/* ---- */

static const sim_test tests[] = {
    {"graphs", test_graphs},
    {"capture errors", test_capture_errors},
};

int main(int argc, char **argv)
{
    return run_tests(argc, argv, tests, sizeof tests / sizeof *tests);
}
