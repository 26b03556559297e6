// A layer before the C library (LD_PRELOAD) in which the n-th call that changes files under a
// directory fails. The test says how, by variables of the environment:
//   FAULT_UNDER  the directory, an absolute path
//   FAULT_AT     which call fails, from 1 on; 0: none
//   FAULT_KIND   full: it and all later ones that take room, as a full disk does
//                io: it alone, as a broken sector does
//                short: it writes a part of what it was given
//   FAULT_COUNT  a file that gets the number of calls
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long calls;

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int below(const char *path) {
    const char *under = getenv("FAULT_UNDER");
    size_t length = under ? strlen(under) : 0;
    return length && !strncmp(path, under, length) && (path[length] == '/' || !path[length]);
}

static int below_fd(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return below(path);
}

enum { PASS, FAIL, SHORT };

// Counts a call. `takes_room`: a full disk would refuse it.
static int next_is(int takes_room) {
    const char *at = getenv("FAULT_AT"), *kind = getenv("FAULT_KIND");
    long n = atomic_fetch_add(&calls, 1) + 1, when = at ? atol(at) : 0;
    if (!when || !kind) return PASS;
    if (!strcmp(kind, "full")) {
        errno = ENOSPC;
        return n >= when && takes_room ? FAIL : PASS;
    }
    errno = EIO;
    if (n != when) return PASS;
    return strcmp(kind, "short") ? FAIL : takes_room ? SHORT : PASS;
}

ssize_t write(int fd, const void *data, size_t size) {
    int what = below_fd(fd) ? next_is(1) : PASS;
    if (what == FAIL) return -1;
    return NEXT(write)(fd, data, what == SHORT && size > 1 ? size / 2 : size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    int what = below_fd(fd) ? next_is(1) : PASS;
    if (what == FAIL) return -1;
    return NEXT(pwrite64)(fd, data, what == SHORT && size > 1 ? size / 2 : size, offset);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    int what = below_fd(fd) ? next_is(1) : PASS;
    if (what == FAIL) return -1;
    return NEXT(writev)(fd, parts, what == SHORT && count > 1 ? count / 2 : count);
}

int fsync(int fd) { return below_fd(fd) && next_is(1) == FAIL ? -1 : NEXT(fsync)(fd); }

int fdatasync(int fd) { return below_fd(fd) && next_is(1) == FAIL ? -1 : NEXT(fdatasync)(fd); }

int ftruncate64(int fd, off64_t size) {
    return below_fd(fd) && next_is(1) == FAIL ? -1 : NEXT(ftruncate64)(fd, size);
}

int mkdir(const char *path, mode_t mode) {
    return below(path) && next_is(1) == FAIL ? -1 : NEXT(mkdir)(path, mode);
}

int rename(const char *from, const char *to) {
    return below(to) && next_is(0) == FAIL ? -1 : NEXT(rename)(from, to);
}

int unlink(const char *path) { return below(path) && next_is(0) == FAIL ? -1 : NEXT(unlink)(path); }

int rmdir(const char *path) { return below(path) && next_is(0) == FAIL ? -1 : NEXT(rmdir)(path); }

int open64(const char *path, int flags, ...) {
    mode_t mode = 0;
    if (flags & O_CREAT) {
        va_list rest;
        va_start(rest, flags);
        mode = va_arg(rest, mode_t);
        va_end(rest);
        if (below(path) && next_is(1) == FAIL) return -1;
    }
    return NEXT(open64)(path, flags, mode);
}

__attribute__((destructor)) static void tell(void) {
    const char *path = getenv("FAULT_COUNT");
    int fd = path ? NEXT(open64)(path, O_WRONLY | O_CREAT | O_TRUNC, 0644) : -1;
    if (fd >= 0) dprintf(fd, "%ld", atomic_load(&calls));
}
