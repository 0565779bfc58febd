/* Starts a program from a large process without copying that process; see spawn.py, which loads this file's library.
 *
 * vfork lends the parent's memory to the child until the child executes the program, so no page table is copied and no
 * page is copied on write afterwards. In return the child may only make system calls: it shares the parent's stack,
 * and libc's locks may be held by nobody who could release them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#define MAX_DESCRIPTORS 64

/* Close the descriptors from first to last (close_range(2), Linux 5.9). */
static long close_range_of(unsigned first, unsigned last) { return syscall(SYS_close_range, first, last, 0); }

/* In the child: become the program, or end with 127 as a shell does. */
static void become(const char *path, char *const arguments[], char *const environment[],
                   const int *sources, const int *targets, int count) {
    int copies[MAX_DESCRIPTORS];
    struct sigaction standard = {.sa_handler = SIG_DFL};
    sigset_t none;
    /* A session and a process group of its own: signals to the group of the parent do not reach it. */
    if (setsid() < 0 || prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) < 0) return;
    /* Copies above all targets come first: a source may have the number that another one shall have. */
    for (int i = 0; i < count; i++)
        if ((copies[i] = fcntl(sources[i], F_DUPFD_CLOEXEC, targets[count - 1] + 1)) < 0) return;
    for (int i = 0; i < count; i++)
        if (dup2(copies[i], targets[i]) < 0) return;
    unsigned next = 0;
    for (int i = 0; i < count; next = (unsigned)targets[i++] + 1)
        if ((unsigned)targets[i] > next && close_range_of(next, (unsigned)targets[i] - 1) < 0) return;
    if (close_range_of(next, ~0U) < 0) return;
    /* Ignored and blocked signals stay so across an exec. Of 32 and 33, libc's own, the call itself refuses a change. */
    for (int number = 1; number < NSIG; number++)
        if (number != SIGKILL && number != SIGSTOP) sigaction(number, &standard, 0);
    sigemptyset(&none);
    if (sigprocmask(SIG_SETMASK, &none, 0) < 0) return;
    execve(path, arguments, environment);
}

/* Start a program as the leader of a new session and as a child subreaper. It gets sources[i] as descriptor targets[i]
 * and no others; targets ascend. Return its pid, or -1 with errno. */
pid_t forkpoint_spawn_leader(const char *path, char *const arguments[], char *const environment[],
                             const int *sources, const int *targets, int count) {
    sigset_t all, before;
    if (count < 1 || count > MAX_DESCRIPTORS) {
        errno = EINVAL;
        return -1;
    }
    /* A handler of the parent must not run in the child, on the parent's memory. */
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before);
    pid_t pid = vfork();
    if (pid == 0) {
        become(path, arguments, environment, sources, targets, count);
        _exit(127);
    }
    int error = errno;
    sigprocmask(SIG_SETMASK, &before, 0);
    errno = error;
    return pid;
}
