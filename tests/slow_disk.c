/* LD_PRELOAD: every write and fsync of a file below $SLOW_BELOW takes $SLOW_S seconds longer, and is noted in $SLOW_NOTES
   as "<monotonic seconds> <thread id> <process id> <path>". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void slow(int fd) {
    const char *below = getenv("SLOW_BELOW"), *notes = getenv("SLOW_NOTES"), *seconds = getenv("SLOW_S");
    char link[64], path[4096];
    struct timespec now;
    if (!below || !notes || !seconds) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0) return;
    path[n] = 0;
    if (strncmp(path, below, strlen(below))) return;
    clock_gettime(CLOCK_MONOTONIC, &now);
    FILE *out = fopen(notes, "a");
    if (out) {
        fprintf(out, "%ld.%09ld %ld %d %s\n", (long)now.tv_sec, now.tv_nsec, syscall(SYS_gettid), getpid(), path);
        fclose(out);
    }
    usleep((useconds_t)(atof(seconds) * 1e6));
}

ssize_t write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "write");
    slow(fd);
    return real(fd, data, size);
}

int fsync(int fd) {
    static int (*real)(int);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "fsync");
    slow(fd);
    return real(fd);
}
