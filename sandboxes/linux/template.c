/* A template: a session's shell that waits where it would read its next command, and forks shells instead of going on.
 *
 * A shell that was forked is what a new shell would be that becomes the same session: what bash has read of the sandbox,
 * restoring the session and its first dump were done once. sandboxes/guest/anchors/template.py decides when that holds, and
 * has the other end. This is a part of preloaded.c.
 *
 * The template hides as the anchor does. It holds no file of the sandbox, so that the layers can change below it: its
 * directory is the root, and what is mapped of the sandbox's files becomes memory of its own.
 *
 * A request is a 32-bit size and the path of the directory to begin in, with its NUL. The answer is one line with a
 * number: the new process, or 0 if it cannot be as wanted. The first line says that this is a template, and the second
 * one comes when it can fork: 1, or 0 if it cannot stand for new shells.
 */
enum { GO = 32, ITS_REQUESTS = 34, ITS_REPLIES = 35, FOR_TEMPLATE = KIT + 8, MAX_MAPS = 1 << 16, PAGE = 4096 };
#define OWN_FILES "/dev/.shell/"

struct timeval_of_bash { long seconds, microseconds; };
/* Variables and functions of bash that hold what a fork has to know anew. bash exports them for its plugins. */
static struct {
    int *shell_pid, *shell_group;
    long *began_s;
    struct timeval_of_bash *began;
    void (*seed)(void), (*seed32)(void);
    const char *const *version;
    int (*pselect)(int, unsigned long *, void *, void *, const void *, const void *);
} inside;
static int is_template; /* Whether this process stops when it waits for its next command. */
static char maps[MAX_MAPS];

/* Find them; return whether this is a bash whose forks go on well without being templates. */
static int find_inside(void) {
    inside.shell_pid = dlsym(ANY_LIBRARY, "dollar_dollar_pid"), inside.shell_group = dlsym(ANY_LIBRARY, "shell_pgrp");
    inside.began_s = dlsym(ANY_LIBRARY, "shell_start_time"), inside.began = dlsym(ANY_LIBRARY, "shellstart");
    inside.seed = dlsym(ANY_LIBRARY, "seedrand"), inside.seed32 = dlsym(ANY_LIBRARY, "seedrand32");
    inside.pselect = dlsym(NEXT_LIBRARY, "pselect"), inside.version = dlsym(ANY_LIBRARY, "dist_version");
    return inside.pselect != 0;
}

/* Whether all of them are there, in the version of bash in which nothing else has to be known anew. */
static int can_be_template(void) {
    return inside.shell_pid && inside.shell_group && inside.began_s && inside.began && inside.seed && inside.seed32 &&
           inside.version && equal(*inside.version, "5.2");
}

/* In a shell that is to be a template: take the pipes to pid 1, and say so. */
static void expect_requests(void) {
    CALL(dup3, FOR_TEMPLATE, ITS_REQUESTS, O_CLOEXEC, 0);
    CALL(dup3, FOR_TEMPLATE + 1, ITS_REPLIES, O_CLOEXEC, 0);
    answer_on(ITS_REPLIES, 0);
    is_template = 1;
}

static unsigned long hex_in(const char **text) {
    unsigned long number = 0;
    for (;; (*text)++) {
        if (**text >= '0' && **text <= '9') number = 16 * number + (unsigned long)(**text - '0');
        else if (**text >= 'a' && **text <= 'f') number = 16 * number + (unsigned long)(**text - 'a' + 10);
        else return number;
    }
}

/* Put memory with the same content in the place of a mapped file; return whether it could be done. */
static int make_own(unsigned long begin, unsigned long end, int protection) {
    long size = (long)(end - begin);
    char *copy = (char *)invoke(__NR_mmap, 0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if ((unsigned long)copy > -(unsigned long)PAGE) return 0;
    for (long i = 0; i < size / (long)sizeof(long); i++) ((long *)copy)[i] = ((const long *)begin)[i];
    if (CALL(mprotect, copy, size, protection, 0)) return 0;
    return invoke(__NR_mremap, (long)copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, (long)begin, 0) == (long)begin;
}

/* Whether pid 1 ends templates when the file changes (`SYSTEM` in template.py), and the file is no program. */
static int is_system_data(const char *path, int protection) {
    static const char *const folders[] = {"/usr/", "/etc/", "/lib/", "/lib32/", "/lib64/", "/libx32/", "/bin/", "/sbin/"};
    for (unsigned i = 0; i < sizeof folders / sizeof *folders; i++)
        if (begins(path, folders[i])) return protection == PROT_READ;
    return 0;
}

/* Whether what bash asks about users is in /etc, and not behind a link to elsewhere. */
static int users_are_system_data(void) {
    static const char *const paths[] = {"/etc", "/etc/passwd", "/etc/nsswitch.conf"};
    for (unsigned i = 0; i < sizeof paths / sizeof *paths; i++) {
        struct stat found;
        long error = CALL(newfstatat, AT_FDCWD, paths[i], &found, AT_SYMLINK_NOFOLLOW);
        if (error ? error != -2 : (found.st_mode & 0170000) == 0120000) return 0; /* -2: ENOENT; the type of a link */
    }
    return 1;
}

/* Make all that is mapped of the sandbox's files memory of this process; return whether it holds none any more. The
 * lines of /proc/self/maps are in proc_pid_maps(5). */
static int hold_no_file(void) {
    long size = read_file("/proc/self/maps", maps, sizeof maps - 1);
    if (size <= 0 || size == sizeof maps - 1) return 0;
    maps[size] = 0;
    for (const char *line = maps; *line; line++) {
        unsigned long begin = hex_in(&line), end = (line++, hex_in(&line));
        int protection = (line[1] == 'r' ? PROT_READ : 0) | (line[2] == 'w' ? PROT_WRITE : 0) | (line[3] == 'x' ? PROT_EXEC : 0);
        const char *path = line;
        while (*path && *path != '\n' && *path != '/') path++;
        for (line = path; *line && *line != '\n';) line++;
        if (*path != '/' || begins(path, OWN_FILES)) continue;
        if (!is_system_data(path, protection) || !make_own(begin, end, protection)) return 0;
    }
    return 1;
}

/* In the fork: open a descriptor of the template again, so that the two share no flags, offsets or locks. */
static int open_again(int fd) {
    char path[] = "/proc/self/fd/00", *number = path + sizeof path - 3;
    if (fd >= 10) *number++ = (char)('0' + fd / 10);
    number[0] = (char)('0' + fd % 10), number[1] = 0;
    int writes = fd == 1 || fd == 2 || fd == GO + 1;
    long opened = CALL(openat, AT_FDCWD, fd ? path : "/dev/null", writes ? O_WRONLY : O_RDONLY, 0);
    int done = opened >= 0 && CALL(dup3, opened, fd, 0, 0) == fd;
    if (opened >= 0) CALL(close, opened, 0, 0, 0);
    return done;
}

/* In the fork: be a shell that has just become the session; return whether it could be done. */
static int begin_from_template(const char *folder, const unsigned long *signals) {
    static const int descriptors[] = {0, 1, 2, GO - 3, GO - 2, GO - 1, GO, GO + 1};
    struct timeval_of_bash now;
    CALL(setpgid, 0, 0, 0, 0);
    for (unsigned i = 0; i < sizeof descriptors / sizeof *descriptors; i++)
        if (!open_again(descriptors[i])) return 0;
    if (CALL(chdir, folder, 0, 0, 0) || CALL(faccessat, AT_FDCWD, ".", 1, 0)) return 0;
    *inside.shell_pid = *inside.shell_group = (int)CALL(getpid, 0, 0, 0, 0);
    CALL(gettimeofday, &now, 0, 0, 0);
    *inside.began = now, *inside.began_s = now.seconds;
    inside.seed(), inside.seed32();
    if (!show(own_arguments, end_of_arguments, own_variables.begin, own_variables.end)) return 0;
    answer_on(ITS_REPLIES, (unsigned)*inside.shell_pid);
    CALL(close_range, ITS_REQUESTS, ITS_REPLIES, 0, 0);
    CALL(prctl, PR_SET_NAME, "bash", 0, 0);
    CALL(rt_sigprocmask, SIG_SETMASK, signals, 0, sizeof *signals);
    /* Last, as in `begin_shell`. */
    CALL(prctl, PR_SET_DUMPABLE, 1, 0, 0);
    return 1;
}

/* The second that it is, by a clock that is never set. */
static long this_second(void) {
    struct __kernel_timespec now = {0, 0};
    CALL(clock_gettime, CLOCK_MONOTONIC, &now, 0, 0);
    return (long)now.tv_sec;
}

/* Fork shells as long as pid 1 asks for some; return in each of them. */
static void serve_as_template(void) {
    unsigned long all = ~0UL, signals = 0;
    /* The anchor has compared the files just before it forked this process. */
    long compared_s = this_second();
    char folder[PAGE], name[] = "anchor";
    unsigned size;
    /* A signal for the template must run no trap in its forks. */
    CALL(rt_sigprocmask, SIG_SETMASK, &all, &signals, sizeof all);
    CALL(prctl, PR_SET_DUMPABLE, 0, 0, 0);
    CALL(prctl, PR_SET_NAME, name, 0, 0);
    is_template = 0;
    int can_fork = show(name, name + sizeof name, name, name) && CALL(chdir, "/", 0, 0, 0) == 0;
    answer_on(ITS_REPLIES, can_fork && users_are_system_data() && hold_no_file());
    for (;;) {
        receive_from(ITS_REQUESTS, (char *)&size, sizeof size);
        if (!size || size > sizeof folder) leave(1);
        receive_from(ITS_REQUESTS, folder, size);
        folder[size - 1] = 0;
        /* When a command changes these files, pid 1 ends its templates. What else may change them is an update of the
         * machine, of which a look once a second is enough: after a move to other layers it takes 0.1 ms. */
        long now_s = this_second();
        int known = now_s == compared_s || files_are_known();
        if (known) compared_s = now_s;
        /* The anchor is its parent, as for each shell. */
        long pid = known ? fork_with(CLONE_PARENT) : -1;
        if (pid == 0) {
            if (begin_from_template(folder, &signals)) return;
            answer_on(ITS_REPLIES, 0);
            leave(NOT_FOUND);
        }
        if (pid < 0) answer_on(ITS_REPLIES, 0);
    }
}

/* bash waits for a line by this function of libc, which a template stops in when it waits for its next command. */
EXPORTED int pselect(int count, unsigned long *in, void *out, void *except, const void *limit, const void *signals) {
    if (is_template && count == GO + 1 && in && *in >> GO & 1) serve_as_template();
    return inside.pselect(count, in, out, except, limit, signals);
}
