/*
 * suspend.cu: how long the driver takes to disable and enable a process's channels (native/channel.c), and how that goes while programs start
 * on another GPU of the host.
 *
 *   nvcc -O2 -std=c++17 -arch=native -I native/bench -o suspend native/bench/suspend.cu -lcuda && ./suspend SECONDS
 *
 * The process launches kernels, has its channels disabled 2 ms later, and enabled 1 ms after that, again and again. A line each two seconds: how
 * often, and p50, p99 and the longest of both, in microseconds. Start programs on another GPU meanwhile (CUDA_VISIBLE_DEVICES).
 */
#include <algorithm>
#include <cstdio>
#include <cuda_runtime.h>

#include "channels.h"
#include "work.h"

static double quantile(std::vector<double> &list, double q)
{
    std::sort(list.begin(), list.end());
    return list[(size_t)(q * (double)(list.size() - 1))];
}

static void print(const char *what, std::vector<double> &took)
{
    printf("  %s p50 %.0f p99 %.0f longest %.0f", what, quantile(took, 0.5), quantile(took, 0.99), quantile(took, 1));
    took.clear();
}

int main(int argc, char **argv)
{
    double seconds = argc > 1 ? atof(argv[1]) : 0;
    if (seconds <= 0) {
        fprintf(stderr, "suspend: expected a number of seconds\n");
        return 2;
    }
    if (cudaFree(0) != cudaSuccess || !find_channels()) {
        fprintf(stderr, "suspend: this process cannot control its channels here\n");
        return 1;
    }
    std::vector<double> off, on;
    double began = now_us(), next = began + 2e6;
    while (now_us() - began < seconds * 1e6) {
        for (int i = 0; i < 3; i++)
            work<<<SMS * 8, 256>>>(20000, nullptr);
        usleep(2000);
        double before = now_us();
        int result = suspend(true);
        off.push_back(now_us() - before);
        usleep(1000);
        before = now_us();
        result |= suspend(false);
        on.push_back(now_us() - before);
        if (result != 0 || cudaDeviceSynchronize() != cudaSuccess) {
            fprintf(stderr, "suspend: the driver refused (%d)\n", result);
            return 1;
        }
        if (now_us() < next)
            continue;
        next += 2e6;
        printf("%5.0f s: %zu", (now_us() - began) / 1e6, off.size());
        print("off", off);
        print("on", on);
        printf("\n");
        fflush(stdout);
    }
    return 0;
}
