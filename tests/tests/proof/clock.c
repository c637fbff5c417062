/* Moves a process's real-time clock. LD_PRELOAD loads it; the file of BATON_TEST_CLOCK says by how many seconds, and
 * counts how often the moved clock was read. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct moved_clock {
    volatile long seconds;
    volatile long reads;
};

static struct moved_clock *moved;
static int (*kernels_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void)
{
    kernels_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("BATON_TEST_CLOCK");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *page = mmap(NULL, sizeof *moved, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED)
        moved = page;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    if (!kernels_gettime)
        begin();
    int result = kernels_gettime(clock, now);
    if (result == 0 && clock == CLOCK_REALTIME && moved && moved->seconds) {
        now->tv_sec += moved->seconds;
        __sync_fetch_and_add(&moved->reads, 1);
    }
    return result;
}
