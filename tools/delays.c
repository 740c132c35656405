/* Delays system calls at random, so that processes and threads meet in orders that are rare otherwise.

   For LD_PRELOAD (tools/stress.py --delays): a call of a hundred waits before it begins or after it has ended, mostly
   under 4 ms, sometimes up to 40 ms; calls that are rare and that others wait for (bind, rename, fork, kill) one of
   ten. Threads of C libraries are delayed too, such as libzmq's, which opens and closes connections in its own. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { OFTEN = 100, RARELY = 10, SHORT_US = 4000, LONG_US = 40000 };

static __thread uint64_t state;

static uint64_t random_number(void)
{
    if (!state) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        state = ((uint64_t)now.tv_nsec << 32) ^ ((uint64_t)syscall(SYS_gettid) << 8) ^ 1;
    }
    state ^= state << 13; /* xorshift64: Marsaglia, Xorshift RNGs, 2003 */
    state ^= state >> 7;
    return state ^= state << 17;
}

/* Waits in one call of `one_in`; leaves errno as it is. */
static void delay(int one_in)
{
    int error = errno;
    uint64_t number = random_number();
    if (number % one_in == 0) {
        uint64_t most = number >> 20 & 3 ? SHORT_US : LONG_US;
        struct timespec time = {0, (long)((number >> 24) % most) * 1000};
        syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &time, 0);
    }
    errno = error;
}

/* Defines a function of libc anew: as before, but delayed before it begins and after it has ended. */
#define DELAYED(one_in, type, name, parameters, ...)                                                                   \
    type name parameters                                                                                               \
    {                                                                                                                  \
        static type(*original) parameters;                                                                             \
        if (!original)                                                                                                 \
            original = (type(*) parameters)dlsym(RTLD_NEXT, #name);                                                    \
        delay(one_in);                                                                                                 \
        type result = original(__VA_ARGS__);                                                                           \
        delay(one_in);                                                                                                 \
        return result;                                                                                                 \
    }

DELAYED(OFTEN, int, close, (int file), file)
DELAYED(OFTEN, ssize_t, write, (int file, const void *from, size_t size), file, from, size)
DELAYED(OFTEN, ssize_t, send, (int file, const void *from, size_t size, int flags), file, from, size, flags)
DELAYED(OFTEN, ssize_t, recv, (int file, void *to, size_t size, int flags), file, to, size, flags)
DELAYED(OFTEN, ssize_t, sendmsg, (int file, const struct msghdr *message, int flags), file, message, flags)
DELAYED(OFTEN, ssize_t, recvmsg, (int file, struct msghdr *message, int flags), file, message, flags)
DELAYED(OFTEN, int, epoll_wait, (int file, struct epoll_event *to, int most, int limit), file, to, most, limit)
DELAYED(OFTEN, int, poll, (struct pollfd * files, nfds_t count, int limit), files, count, limit)
DELAYED(RARELY, int, connect, (int file, const struct sockaddr *address, socklen_t size), file, address, size)
DELAYED(RARELY, int, bind, (int file, const struct sockaddr *address, socklen_t size), file, address, size)
DELAYED(RARELY, int, listen, (int file, int backlog), file, backlog)
DELAYED(RARELY, int, accept, (int file, struct sockaddr *address, socklen_t *size), file, address, size)
DELAYED(RARELY, int, accept4, (int file, struct sockaddr *address, socklen_t *size, int flags), file, address, size, flags)
DELAYED(RARELY, int, shutdown, (int file, int how), file, how)
DELAYED(RARELY, int, unlink, (const char *path), path)
DELAYED(RARELY, int, rename, (const char *from, const char *to), from, to)
DELAYED(RARELY, int, fsync, (int file), file)
DELAYED(RARELY, pid_t, fork, (void), )
DELAYED(RARELY, int, kill, (pid_t process, int number), process, number)
DELAYED(RARELY, pid_t, waitpid, (pid_t process, int *status, int options), process, status, options)
