/* For LD_PRELOAD: a clock that is CLOCK_OFFSET seconds off, and flock() that fails as on a Lustre
 * mounted without locks, if NO_FLOCK is set. Waits are by the monotonic clock, and stay right. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static time_t offset(void) {
    const char *text = getenv("CLOCK_OFFSET");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (clock == CLOCK_REALTIME)
        now->tv_sec += offset();
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec spec;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &spec);
    now->tv_sec = spec.tv_sec;
    now->tv_usec = spec.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *where) {
    struct timespec spec;
    clock_gettime(CLOCK_REALTIME, &spec);
    if (where)
        *where = spec.tv_sec;
    return spec.tv_sec;
}

int flock(int file, int operation) {
    static int (*real)(int, int);
    if (!real)
        real = dlsym(RTLD_NEXT, "flock");
    if (getenv("NO_FLOCK")) {
        errno = ENOSYS;
        return -1;
    }
    return real(file, operation);
}
