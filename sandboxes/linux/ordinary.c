/* The steps of an ordinary call in pid 1 of a local sandbox; sandboxes/local/ordinary_calls.py has the theory, and loads
 * this file's library.
 *
 * Nothing is decided here. Each function compares what it sees with what Python saw once, when a call had left nothing
 * behind, and returns as soon as anything differs. Python then goes on from there, in the way that it goes without this
 * library.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_send_signal 424
#define SYS_pidfd_open 434
#endif

enum { OUTPUT = 1 << 14, DUMP = 1 << 15, FACTS = 1 << 14, PIPES = 4, TEXTS = 4, FIRST_MS = 1000, PATIENCE_MS = 10000 };
enum { ORDINARY, NOT_BEGUN, BEGUN, FAILED }; /* Results of `forkpoint_run`. */
enum { WAITING, READY, USELESS }; /* What is known of a template. */
enum { ENDED, ANCHOR_TOUCHED, KIT_TOUCHED }; /* Results of `forkpoint_end`. */
static const char END[] = "forkpoint-end-of-dump"; /* With the NUL behind it. */

struct bytes {
    const char *data;
    long size;
};

/* One session's shell, and what is known of it. `_Shell` in ordinary_calls.py has the same members. */
struct shell {
    int link, anchor, requests, replies, pid, death, out, err, dump, go, command;
    int template, template_death, template_requests, template_replies, template_state, forked; /* No template: 0. */
    int last_fork; /* The process that the template has forked before; 0 for none. */
    int has_dumped; /* Whether the first dump was read before. */
    int pipes[PIPES], texts[TEXTS]; /* The kit, at the shell's side. */
    struct bytes first_dump, last_dump, descriptors, facts, anchor_facts, template_facts, kit_facts, script, loop, request;
    const char *folder;
    double began_s; /* When the last command began, by the monotonic clock. */
    int status, out_size, err_size, dump_size; /* What a run has left in the buffers. */
    char out_data[OUTPUT], err_data[OUTPUT], dump_data[DUMP];
};

struct facts {
    char data[FACTS];
    long size;
    int failed;
};

static void put(struct facts *facts, const void *data, long size) {
    if (size < 0 || facts->size + size > FACTS) {
        facts->failed = 1;
        return;
    }
    memcpy(facts->data + facts->size, data, (size_t)size);
    facts->size += size;
}

/* Put what a file of /proc shows. The kernel gives such a file whole to one read (seq_file.rst). An empty one is that
 * of a process which is ending. */
static void put_file(struct facts *facts, const char *format, int pid) {
    char path[64];
    snprintf(path, sizeof path, format, pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    long size = fd < 0 ? -1 : read(fd, facts->data + facts->size, (size_t)(FACTS - facts->size));
    if (fd >= 0) close(fd);
    if (size <= 0 || facts->size + size >= FACTS) facts->failed = 1;
    else facts->size += size;
}

/* Put what `live_state.passed_on` reads of a process. */
static void put_passed_on(struct facts *facts, int pid) {
    char attributes[56] = {0};
    unsigned long cpus[64] = {0};
    long io_priority = syscall(SYS_ioprio_get, 1, pid);
    if (syscall(SYS_sched_getattr, pid, attributes, sizeof attributes, 0) < 0 || io_priority < 0) facts->failed = 1;
    if (syscall(SYS_sched_getaffinity, pid, sizeof cpus, cpus) < 0) facts->failed = 1;
    put(facts, attributes, sizeof attributes);
    put(facts, &io_priority, sizeof io_priority);
    put(facts, cpus, sizeof cpus);
    put_file(facts, "/proc/%d/oom_score_adj", pid);
    put_file(facts, "/proc/%d/coredump_filter", pid);
    put_file(facts, "/proc/%d/limits", pid);
}

/* Put who may use a directory or device of the sandbox, and its time if that says something. */
static void put_place(struct facts *facts, const char *path, int with_time) {
    struct stat status;
    if (stat(path, &status) < 0) {
        facts->failed = 1;
        return;
    }
    put(facts, &status.st_mode, sizeof status.st_mode);
    put(facts, &status.st_uid, sizeof status.st_uid);
    put(facts, &status.st_gid, sizeof status.st_gid);
    if (with_time) put(facts, &status.st_mtim, sizeof status.st_mtim);
}

/* What a command may change of an idle shell and of pid 1 (`live_state.settings`). */
static void see_shell(struct facts *facts, int pid) {
    facts->size = facts->failed = 0;
    put_passed_on(facts, pid);
    put_passed_on(facts, getpid());
    put_place(facts, "/dev/pts/ptmx", 0);
    put_place(facts, "/dev/pts", 1);
    put_place(facts, "/proc", 1);
}

/* The state of a process in /proc/PID/stat: `R`, `S` and so on; 0 if there is no such process, and `?` if it cannot be
 * read: a command may have lowered the descriptors of pid 1. */
static char state_of(int pid, int *threads) {
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT || errno == ESRCH ? 0 : '?';
    long size = read(fd, text, sizeof text - 1);
    int error = errno;
    close(fd);
    if (size < 0 && error == ESRCH) return 0;
    if (size <= 0) return '?';
    text[size] = 0;
    char *fields = strrchr(text, ')');
    if (!fields || strlen(fields) < 3) return '?';
    char state = fields[2];
    /* The name ends with the parenthesis; the number of threads is field 20, and the state is field 3. */
    for (int field = 2; fields && field < 20; field++) fields = strchr(fields + 1, ' ');
    *threads = fields ? atoi(fields) : 2;
    return state;
}

/* What a command may change of a process that starts shells (`LocalShells.anchor_was_touched`). It cannot write a
 * request, and one to take note of a fork may wait. */
static void see_starter(struct facts *facts, int pid, int replies) {
    int unread = 1, threads;
    facts->size = facts->failed = 0;
    put_passed_on(facts, pid);
    if (ioctl(replies, FIONREAD, &unread) < 0 || unread) facts->failed = 1;
    char state = state_of(pid, &threads);
    if (!state || state == '?' || state == 'T' || state == 't') facts->failed = 1;
}

static void see_anchor(struct facts *facts, const struct shell *shell) {
    see_starter(facts, shell->anchor, shell->replies);
}

static void see_template(struct facts *facts, const struct shell *shell) {
    facts->size = facts->failed = 0;
    if (shell->template) see_starter(facts, shell->template, shell->template_replies);
}

/* What a command may change of the pipes and texts that the next shell gets (`shell_kit.changeable`). */
static void see_kit(struct facts *facts, const struct shell *shell) {
    facts->size = facts->failed = 0;
    for (int i = 0; i < PIPES + TEXTS; i++) {
        int fd = i < PIPES ? shell->pipes[i] : shell->texts[i - PIPES], unread = 1;
        struct stat status;
        if (fstat(fd, &status) < 0) facts->failed = 1;
        put(facts, &status.st_mode, sizeof status.st_mode);
        put(facts, &status.st_uid, sizeof status.st_uid);
        put(facts, &status.st_gid, sizeof status.st_gid);
        if (i >= PIPES) continue;
        int capacity = fcntl(fd, F_GETPIPE_SZ);
        if (ioctl(fd, FIONREAD, &unread) < 0 || unread) facts->failed = 1;
        put(facts, &capacity, sizeof capacity);
    }
}

static int is_known(const struct facts *facts, const struct bytes *known) {
    return !facts->failed && facts->size == known->size && !memcmp(facts->data, known->data, (size_t)known->size);
}

/* Whether no process runs but pid 1, the anchor, the template and the shell (`processes.list_processes`). */
static int is_alone(const struct shell *shell) {
    DIR *folder = opendir("/proc");
    int alone = folder != NULL;
    for (struct dirent *entry; alone && (errno = 0, entry = readdir(folder));) {
        int pid = atoi(entry->d_name), threads = 0;
        if (pid <= 1 || pid == shell->anchor || pid == shell->template || pid == shell->pid) continue;
        char state = state_of(pid, &threads);
        /* A process whose first thread has ended looks like a zombie, but its other threads run on. */
        alone = !state || ((state == 'Z' || state == 'X') && threads <= 1);
    }
    if (errno) alone = 0;
    if (folder) closedir(folder);
    return alone;
}

/* Whether the shell has the known descriptors open and no others. */
static int has_known_descriptors(const struct shell *shell) {
    char path[64], text[4096], target[256];
    long size = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", shell->pid);
    DIR *folder = opendir(path);
    if (!folder) return 0;
    for (struct dirent *entry; (errno = 0, entry = readdir(folder));) {
        if (entry->d_name[0] == '.') continue;
        long length = readlinkat(dirfd(folder), entry->d_name, target, sizeof target);
        if (length < 0 || length >= (long)sizeof target || size + length + 32 > (long)sizeof text) {
            size = -1;
            break;
        }
        size += snprintf(text + size, 32, "%s ", entry->d_name);
        memcpy(text + size, target, (size_t)length);
        size += length;
        text[size++] = 0;
    }
    closedir(folder);
    return size == shell->descriptors.size && !memcmp(text, shell->descriptors.data, (size_t)size);
}

static void pause_ns(long nanoseconds) {
    struct timespec pause = {0, nanoseconds};
    nanosleep(&pause, 0);
}

/* The same, where the shell is given the moment after its dump in which it still has others open. */
static int holds_nothing(const struct shell *shell) {
    for (int looks = 0; looks < 20; looks++) {
        int threads;
        /* Before the look: the shell may close them and then fall asleep between the two. */
        char state = state_of(shell->pid, &threads);
        if (has_known_descriptors(shell)) return 1;
        if (state != 'R' && state != 'D') return 0;
        pause_ns(200000);
    }
    return 0;
}

/* Whether there is no System V object: each file has its heading only. */
static int has_no_ipc(void) {
    static const char *const files[] = {"/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg"};
    for (int i = 0; i < 3; i++) {
        char text[1024];
        int fd = open(files[i], O_RDONLY | O_CLOEXEC);
        if (fd < 0) return 0;
        long size = read(fd, text, sizeof text);
        close(fd);
        if (size <= 0 || memchr(text, '\n', (size_t)size) != text + size - 1) return 0;
    }
    return 1;
}

/* Whether the name of the shell's directory still leads to the directory that it is in. */
static int stands_there(const struct shell *shell) {
    char path[32];
    struct stat here, there;
    snprintf(path, sizeof path, "/proc/%d/cwd", shell->pid);
    return !stat(path, &here) && !stat(shell->folder, &there) && here.st_dev == there.st_dev && here.st_ino == there.st_ino;
}

static int no_child_ended(void) {
    siginfo_t ended = {.si_pid = 0};
    return waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid == 0;
}

static int nothing_survives(const struct shell *shell) {
    struct facts facts;
    if (!no_child_ended() || !is_alone(shell) || !holds_nothing(shell) || !has_no_ipc() || !stands_there(shell)) return 0;
    see_shell(&facts, shell->pid);
    return is_known(&facts, &shell->facts);
}

/* Record what is seen of the shell, the anchor or the kit now; return the number of bytes, or -1. */
long forkpoint_see(const struct shell *shell, int what, char *to) {
    struct facts facts;
    if (what == 0) see_shell(&facts, shell->pid);
    else if (what == 1) see_anchor(&facts, shell);
    else if (what == 3) see_template(&facts, shell);
    else see_kit(&facts, shell);
    if (facts.failed) return -1;
    memcpy(to, facts.data, (size_t)facts.size);
    return facts.size;
}

/* Read what is there; return 1 if it is all, 0 if there is no room for the rest, or the pipe has failed. */
static int drain(int fd, char *to, int *size, int room) {
    for (;;) {
        if (*size == room) return 0;
        long count = read(fd, to + *size, (size_t)(room - *size));
        if (count < 0 && errno == EAGAIN) return 1;
        if (count <= 0) return 0;
        *size += (int)count;
    }
}

static int is_whole(const struct shell *shell) {
    return shell->dump_size >= (int)sizeof END && !memcmp(shell->dump_data + shell->dump_size - sizeof END, END, sizeof END);
}

/* Read what has come of a dump; return whether it is whole. Bash writes it line by line, so the rest is left to gather. */
static int read_dump(struct shell *shell, int *failed) {
    long count;
    do {
        count = read(shell->dump, shell->dump_data + shell->dump_size, (size_t)(DUMP - shell->dump_size));
        if (count > 0) shell->dump_size += (int)count;
        if (is_whole(shell)) return 1;
        *failed = count == 0 || (count < 0 && errno != EAGAIN) || shell->dump_size == DUMP;
    } while (count >= DUMP / 2 && !*failed);
    if (!*failed) pause_ns(200000);
    return 0;
}

static int await_first_dump(struct shell *shell, int within_ms) {
    struct pollfd ready[2] = {{shell->dump, POLLIN, 0}, {shell->death, POLLIN, 0}};
    int failed = 0;
    shell->dump_size = 0;
    do {
        if (poll(ready, 2, within_ms) <= 0 || ready[1].revents) return 0;
    } while (!read_dump(shell, &failed) && !failed);
    return !failed && shell->dump_size == shell->first_dump.size &&
           !memcmp(shell->dump_data, shell->first_dump.data, (size_t)shell->dump_size);
}

/* Take the exit status of a dump that is the known one otherwise; return whether it is that. */
static int take_status(struct shell *shell) {
    int at = 0;
    shell->status = 0;
    while (at < 3 && at < shell->dump_size && shell->dump_data[at] >= '0' && shell->dump_data[at] <= '9')
        shell->status = 10 * shell->status + shell->dump_data[at++] - '0';
    /* A command may have written a number of its own, which the regular way refuses. */
    return at && shell->status <= 255 && shell->dump_size - at == shell->last_dump.size &&
           !memcmp(shell->dump_data + at, shell->last_dump.data, (size_t)shell->last_dump.size);
}

/* Read answers, which are lines, until so many bytes have come; return whether they end a line. `death`, or -1, is
 * readable once the process has ended that answers. */
static int read_answer(int fd, int death, char *line, int room, int least) {
    struct pollfd ready[2] = {{fd, POLLIN, 0}, {death, POLLIN, 0}};
    int size = 0;
    while (size < room - 1 && (size < least || line[size - 1] != '\n')) {
        long count = poll(ready, 2, PATIENCE_MS) <= 0 || !ready[0].revents ? 0 : read(fd, line + size, (size_t)(room - 1 - size));
        if (count <= 0) return 0;
        size += (int)count;
    }
    line[size] = 0;
    return size && line[size - 1] == '\n';
}

/* Wait until a process that has ended is collected (`ShellTemplate._await_collected`); return whether it is. */
static int is_collected(int pid) {
    for (int looks = 0; pid && (!kill(pid, 0) || errno == EPERM); looks++) {
        if (looks > PATIENCE_MS * 10) return 0;
        pause_ns(100000);
    }
    return 1;
}

/* Have the template fork the shell (`ShellTemplate.fork`); return whether it did so. */
static int fork_shell(struct shell *shell) {
    char line[16], request[4 + 4096], note[32] = {0};
    unsigned size = (unsigned)strlen(shell->folder) + 1, counts[2];
    int fd, pid, unread = 1;
    if (shell->template_state == WAITING) {
        int answered = read_answer(shell->template_replies, shell->template_death, line, sizeof line, 2);
        shell->template_state = answered && !strcmp(line, "1\n") ? READY : USELESS;
    }
    if (shell->template_state != READY || size > sizeof request - 4) return 0;
    if (ioctl(shell->template_replies, FIONREAD, &unread) < 0 || unread || !is_collected(shell->last_fork)) return 0;
    memcpy(request, &size, 4);
    memcpy(request + 4, shell->folder, size);
    if (write(shell->template_requests, request, 4 + size) != 4 + size) return 0;
    if (!read_answer(shell->template_replies, shell->template_death, line, sizeof line, 2)) return 0;
    if ((pid = atoi(line)) <= 1 || (fd = (int)syscall(SYS_pidfd_open, pid, 0)) < 0) return 0;
    /* The anchor is to keep its exit code (`NativeAnchor.take_note_of`). */
    counts[0] = (unsigned)snprintf(note + 8, sizeof note - 8, "n%d", pid) + 1, counts[1] = 1;
    memcpy(note, counts, 8);
    if (write(shell->requests, note, 8 + counts[0]) != 8 + counts[0]) {
        syscall(SYS_pidfd_send_signal, fd, SIGKILL, 0, 0); /* Nothing else knows of it. */
        close(fd);
        return 0;
    }
    shell->pid = pid;
    shell->death = fd;
    shell->forked = 1;
    return 1;
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static int write_text(int fd, const char *text, long size) {
    return ftruncate(fd, 0) == 0 && pwrite(fd, text, (size_t)size, 0) == size;
}

/* Run a command in the shell, and see that it leaves nothing behind.
 *
 * NOT_BEGUN: the command has not been given to the shell; what has come of its first dump is in `dump_data`.
 * BEGUN: it has; what has come of its output and its dump is in the buffers.
 * FAILED: it cannot be given to the shell; errno tells why.
 * ORDINARY: its dump is the known one but for `status`, and all that is known holds. Its output is in the buffers, and
 * the shell is ending. */
int forkpoint_run(struct shell *shell, const char *go, long go_size, const char *text, long text_size, int within_ms) {
    int failed = 0, discarded;
    shell->out_size = shell->err_size = shell->dump_size = 0;
    if (!no_child_ended() || (!shell->has_dumped && !await_first_dump(shell, FIRST_MS))) return NOT_BEGUN;
    if (shell->template && !fork_shell(shell)) return NOT_BEGUN;
    /* What came between calls is dropped. */
    for (int i = 0; i < 2; i++) {
        do discarded = 0;
        while (!drain(i ? shell->err : shell->out, shell->out_data, &discarded, OUTPUT) && discarded == OUTPUT);
    }
    shell->dump_size = 0;
    shell->began_s = now_s();
    if (!write_text(shell->command, text, text_size) || write(shell->go, go, (size_t)go_size) != go_size) return FAILED;
    struct pollfd ready[5] = {{shell->out, POLLIN, 0}, {shell->err, POLLIN, 0}, {shell->dump, POLLIN, 0},
                              {shell->death, POLLIN, 0}, {shell->link, POLLRDHUP, 0}};
    for (;;) {
        double left_ms = within_ms - (now_s() - shell->began_s) * 1000;
        if (left_ms < 1 || poll(ready, 5, (int)left_ms) <= 0 || ready[4].revents) return BEGUN;
        if (ready[0].revents && !drain(shell->out, shell->out_data, &shell->out_size, OUTPUT)) return BEGUN;
        if (ready[1].revents && !drain(shell->err, shell->err_data, &shell->err_size, OUTPUT)) return BEGUN;
        if (ready[2].revents && read_dump(shell, &failed)) break;
        if (ready[3].revents || failed) return BEGUN;
    }
    if (!take_status(shell)) return BEGUN;
    /* The writers are gone or idle now: what is still in the pipes is the last of the command's output. */
    if (!drain(shell->out, shell->out_data, &shell->out_size, OUTPUT)) return BEGUN;
    if (!drain(shell->err, shell->err_data, &shell->err_size, OUTPUT)) return BEGUN;
    if (!nothing_survives(shell)) return BEGUN;
    /* It is replaced after every such call, and ends while Python looks at what was written. */
    syscall(SYS_pidfd_send_signal, shell->death, SIGKILL, 0, 0);
    return ORDINARY;
}

/* End the shell, whose exit status is not needed. Its kit is left for the next one.
 *
 * ANCHOR_TOUCHED: the anchor is not as it was, and nothing was done.
 * KIT_TOUCHED: the shell has ended, and the kit is not as it was made. */
int forkpoint_end(struct shell *shell) {
    struct facts facts;
    struct pollfd death = {shell->death, POLLIN, 0};
    see_anchor(&facts, shell);
    if (!is_known(&facts, &shell->anchor_facts)) return ANCHOR_TOUCHED;
    see_template(&facts, shell);
    if (shell->template && !is_known(&facts, &shell->template_facts)) return ANCHOR_TOUCHED;
    syscall(SYS_pidfd_send_signal, shell->death, SIGKILL, 0, 0);
    poll(&death, 1, PATIENCE_MS);
    see_kit(&facts, shell);
    return is_known(&facts, &shell->kit_facts) ? ENDED : KIT_TOUCHED;
}

/* Have the anchor start the next shell on the kit. Return its pid, with a new `death`; 0 if the anchor fails. */
int forkpoint_start(struct shell *shell) {
    const struct bytes texts[3] = {shell->script, shell->loop, {"", 0}};
    char line[16];
    int unread = 1, fd;
    for (int i = 0; i < 3; i++)
        if (!write_text(shell->texts[i], texts[i].data, texts[i].size)) return 0;
    if (ioctl(shell->replies, FIONREAD, &unread) < 0 || unread) return 0;
    if (write(shell->requests, shell->request.data, (size_t)shell->request.size) != shell->request.size) return 0;
    if (!read_answer(shell->replies, -1, line, sizeof line, 2)) return 0;
    int pid = atoi(line);
    if (pid <= 1 || (fd = (int)syscall(SYS_pidfd_open, pid, 0)) < 0) return 0;
    close(shell->death);
    shell->death = fd;
    shell->pid = pid;
    return pid;
}
