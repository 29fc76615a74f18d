/* Calls on regular files that fail or take their time, for tests/faults/faulty_disk.py.

   LD_PRELOADed into a daemon. KVD_TEST_DISK names a file of five native ints, mapped, so that the
   test can change them at any time: errno of writes, of reads, of syncs (0: none); milliseconds
   that every call takes more; how many calls are held up by that. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { WRITE, READ, SYNC, DELAY, HELD, COUNT };

static volatile int *control;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("KVD_TEST_DISK");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *memory = mmap(NULL, COUNT * sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory != MAP_FAILED)
        control = memory;
}

static int fails(int fd, int kind)
{
    struct stat file;
    if (!control || fstat(fd, &file) || !S_ISREG(file.st_mode))
        return 0;
    __atomic_add_fetch(&control[HELD], 1, __ATOMIC_RELAXED);
    int left = control[DELAY];
    while (left > 0 && control[DELAY]) { /* ends early when the test says so */
        struct timespec step = {0, 10 * 1000 * 1000};
        nanosleep(&step, NULL);
        left -= 10;
    }
    __atomic_sub_fetch(&control[HELD], 1, __ATOMIC_RELAXED);
    errno = control[kind];
    return control[kind] != 0;
}

#define CALL(kind, type, name, parameters, arguments)                  \
    type name parameters                                              \
    {                                                                 \
        static type(*next) parameters;                                \
        if (!next)                                                    \
            next = (type(*) parameters)dlsym(RTLD_NEXT, #name);       \
        return fails(fd, kind) ? -1 : next arguments;                 \
    }

typedef const struct iovec *vec;

CALL(WRITE, ssize_t, pwrite, (int fd, const void *b, size_t n, off_t at), (fd, b, n, at))
CALL(WRITE, ssize_t, pwrite64, (int fd, const void *b, size_t n, off64_t at), (fd, b, n, at))
CALL(WRITE, ssize_t, pwritev, (int fd, vec v, int n, off_t at), (fd, v, n, at))
CALL(WRITE, ssize_t, pwritev64, (int fd, vec v, int n, off64_t at), (fd, v, n, at))
CALL(WRITE, ssize_t, pwritev2, (int fd, vec v, int n, off_t at, int f), (fd, v, n, at, f))
CALL(WRITE, ssize_t, pwritev64v2, (int fd, vec v, int n, off64_t at, int f), (fd, v, n, at, f))
CALL(READ, ssize_t, pread, (int fd, void *b, size_t n, off_t at), (fd, b, n, at))
CALL(READ, ssize_t, pread64, (int fd, void *b, size_t n, off64_t at), (fd, b, n, at))
CALL(READ, ssize_t, preadv, (int fd, vec v, int n, off_t at), (fd, v, n, at))
CALL(READ, ssize_t, preadv64, (int fd, vec v, int n, off64_t at), (fd, v, n, at))
CALL(READ, ssize_t, preadv2, (int fd, vec v, int n, off_t at, int f), (fd, v, n, at, f))
CALL(READ, ssize_t, preadv64v2, (int fd, vec v, int n, off64_t at, int f), (fd, v, n, at, f))
CALL(SYNC, int, fdatasync, (int fd), (fd))
CALL(SYNC, int, fsync, (int fd), (fd))
