// Enough of CUDA to compile kernels.cu as C++ and run it on the CPU, one thread block after another.
//
// Each thread of a block is a fiber. It runs until the next __syncthreads() or its end; the order
// in which fibers run is drawn anew for every stretch, so that a missing barrier is a wrong result.
// A block in which some threads wait at a barrier and others have ended is an error, as on a GPU
// it would be a hang.
//
// What this cannot show: memory coalescing, speed, limits of registers and shared memory, races
// between blocks, and whatever the device compiler does differently.
#pragma once
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static  // one block runs at a time

struct Dim { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
static Dim threadIdx, blockIdx, blockDim, gridDim;

static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::vector<char> ended;
static std::vector<char*> stacks;
static unsigned running;
enum { STACK_BYTES = 64 << 10 };

static void __syncthreads() { swapcontext(&fibers[running], &scheduler); }
static unsigned atomicMax(unsigned* at, unsigned value)
{
    const unsigned old = *at;
    if (value > old) *at = value;
    return old;
}
static unsigned atomicAdd(unsigned* at, unsigned value)
{
    const unsigned old = *at;
    *at += value;
    return old;
}

template <typename... A, size_t... I>
static void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>)
{
    kernel(*(A*)arguments[I]...);
}

template <typename... A> struct Launch {
    static void (*kernel)(A...);
    static void** arguments;
    static void thread()
    {
        call(kernel, arguments, std::index_sequence_for<A...>{});
        ended[running] = 1;
        swapcontext(&fibers[running], &scheduler);
    }
};
template <typename... A> void (*Launch<A...>::kernel)(A...);
template <typename... A> void** Launch<A...>::arguments;

// Returns 0, or 1 if a barrier was not reached by all threads of a block.
template <typename... A>
static int launch(void (*kernel)(A...), unsigned grid, unsigned block, unsigned seed, void** args)
{
    Launch<A...>::kernel = kernel;
    Launch<A...>::arguments = args;
    gridDim = {grid, 1, 1};
    blockDim = {block, 1, 1};
    fibers.resize(block);
    while (stacks.size() < block) stacks.push_back((char*)malloc(STACK_BYTES));
    std::vector<unsigned> order(block);
    for (unsigned i = 0; i < block; i++) order[i] = i;
    for (unsigned b = 0; b < grid; b++) {
        blockIdx = {b, 0, 0};
        ended.assign(block, 0);
        for (unsigned t = 0; t < block; t++) {
            getcontext(&fibers[t]);
            fibers[t].uc_stack.ss_sp = stacks[t];
            fibers[t].uc_stack.ss_size = STACK_BYTES;
            fibers[t].uc_link = &scheduler;
            makecontext(&fibers[t], Launch<A...>::thread, 0);
        }
        for (unsigned left = block; left;) {
            for (unsigned i = block - 1; i; i--) {
                seed = seed * 1664525u + 1013904223u;
                std::swap(order[i], order[(seed >> 8) % (i + 1)]);
            }
            for (unsigned t : order) {
                running = t;
                threadIdx = {t, 0, 0};
                swapcontext(&scheduler, &fibers[t]);
            }
            left = 0;
            for (unsigned t = 0; t < block; t++) left += !ended[t];
            if (left && left != block) return 1;
        }
    }
    return 0;
}

// Defines cpu_NAME(grid, block, seed, addresses of the arguments).
#define KVD_ON_CPU(NAME)                                                                          \
    extern "C" int cpu_##NAME(unsigned grid, unsigned block, unsigned seed, void** arguments)     \
    {                                                                                             \
        return launch(NAME, grid, block, seed, arguments);                                        \
    }
