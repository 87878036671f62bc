/* How long one cache line takes from a core to another and back.

   Two threads, each on its core, write to one line in turn. */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

enum { UNTIMED = 200 }; /* until both threads run where they are to */

static _Alignas(128) atomic_int line;

struct part {
    int core, rounds;
    double ns;
};

static void stay_on(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
}

static void wait_for(int value) {
    while (atomic_load_explicit(&line, memory_order_acquire) != value) {}
}

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

static void *ask(void *argument) {
    struct part *part = argument;
    stay_on(part->core);
    double start = 0;
    for (int i = 0; i < UNTIMED + part->rounds; i++) {
        if (i == UNTIMED) start = now_ns();
        atomic_store_explicit(&line, 2 * i + 1, memory_order_release);
        wait_for(2 * i + 2);
    }
    part->ns = (now_ns() - start) / part->rounds;
    return 0;
}

static void *answer(void *argument) {
    struct part *part = argument;
    stay_on(part->core);
    for (int i = 0; i < UNTIMED + part->rounds; i++) {
        wait_for(2 * i + 1);
        atomic_store_explicit(&line, 2 * i + 2, memory_order_release);
    }
    return 0;
}

/* ns a round trip, or -1 where no thread could be started. Not to be called twice at once. */
double round_trip_ns(int first, int second, int rounds) {
    struct part asked = {first, rounds, -1}, answered = {second, rounds, -1};
    pthread_t asking, answering;
    atomic_store(&line, 0);
    if (pthread_create(&answering, 0, answer, &answered)) return -1;
    if (pthread_create(&asking, 0, ask, &asked)) { /* so that the other ends */
        ask(&asked);
        asked.ns = -1;
    } else
        pthread_join(asking, 0);
    pthread_join(answering, 0);
    return asked.ns;
}
