/* How long one cache line takes from a core to another and back, in ns, on standard output.

       core_to_core FIRST SECOND

   Two threads, each on its core, write to one line in turn. */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { ROUNDS = 300000 };

static _Alignas(128) atomic_int line;
static int second;

static void stay_on(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    sched_setaffinity(0, sizeof cores, &cores);
}

static void wait_for(int value) {
    while (atomic_load_explicit(&line, memory_order_acquire) != value) {}
}

static void *answer(void *nothing) {
    stay_on(second);
    for (int i = 0; i < ROUNDS; i++) {
        wait_for(2 * i + 1);
        atomic_store_explicit(&line, 2 * i + 2, memory_order_release);
    }
    return nothing;
}

int main(int count, char **words) {
    if (count != 3) return 2;
    second = atoi(words[2]);
    pthread_t thread;
    if (pthread_create(&thread, NULL, answer, NULL)) return 1;
    stay_on(atoi(words[1]));
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < ROUNDS; i++) {
        atomic_store_explicit(&line, 2 * i + 1, memory_order_release);
        wait_for(2 * i + 2);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    pthread_join(thread, NULL);
    printf("%.1f\n", ((end.tv_sec - start.tv_sec) * 1e9 + (end.tv_nsec - start.tv_nsec)) / ROUNDS);
    return 0;
}
