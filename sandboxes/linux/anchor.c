/* The anchor of a sandbox, and the shells that are forks of it; sandboxes/guest/anchors has the other end and the theory.
 *
 * It is a library that is loaded into a bash of this machine's (LD_PRELOAD, ld.so(8)), from the copies of shell_files. That
 * bash stops before its first statement and is the anchor: it starts shells for pid 1, inherits the orphans below it,
 * collects all that end, and tells pid 1 exit codes. A shell is a fork of it that goes on to the `main` of bash, as if it
 * had just been executed: with arguments, variables, descriptors and a user of its own, and no memory of another shell.
 * What executing bash takes, and loading its libraries, was done once.
 *
 * The anchor is confined as the agent's processes are. They can kill and stop it, but not trace it or open its descriptors.
 *
 * A request is two 32-bit numbers, the bytes of its texts and their number, and then the texts, each ending with NUL.
 * The first character of a text is its kind:
 *   < or >  a descriptor of the new process, with its number in four digits, and the path to open for it
 *   d       the directory that the new process begins in, which its user need not be able to enter; / if there is none
 *   u       the user of the new process: its number, that of its group, and those of all its groups, each with a blank
 *           before it but the first
 *   a, e    an argument and a variable of the new process
 *   t       last: the process is to be a template (see below)
 *   w       the pid of a process whose exit code is wanted
 *   n       the pid of a process that a template has forked: its exit code will be wanted. There is no answer
 *   c       close the kit
 * The answer is one line with a number: the new process, 0 if it could not be started, or the exit code, UNKNOWN if this
 * anchor does not know it.
 *
 * It needs no libc of its own: that of the bash is there, but has not begun yet.
 */
#include <asm/stat.h>
#include <asm/unistd.h>
#include <linux/fcntl.h>
#include <linux/mman.h>
#include <linux/poll.h>
#include <linux/prctl.h>
#include <linux/sched.h>
#include <linux/signal.h>
#include <linux/time.h>
#include <linux/time_types.h>
#include <linux/wait.h>

#ifndef PR_GET_TID_ADDRESS
#define PR_GET_TID_ADDRESS 40
#endif
#define ANY_LIBRARY ((void *)0) /* RTLD_DEFAULT and RTLD_NEXT of dlsym(3). */
#define NEXT_LIBRARY ((void *)-1L)
#define EXPORTED __attribute__((visibility("default")))
enum { REQUESTS = 3, REPLIES = 4, KIT = 40, OURS = 1000, DIGITS = 4, MAX_TEXTS = 1 << 20, MAX_BYTES = 1 << 28, STARTED = 4096, FIELDS = 52, GROUPS = 1024 };
#define NOT_FOUND 127 /* The exit code of a process that could not become a shell. */
#define UNKNOWN 256   /* Told in place of the exit code of a process that this anchor has not started, or not collected. */

#if defined(__x86_64__)
static inline long invoke(long number, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
#elif defined(__aarch64__)
static inline long invoke(long number, long a, long b, long c, long d, long e, long f) {
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d, x4 __asm__("x4") = e, x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
}
#else
#error "no system calls of this machine are known here; the sandbox's bash is the anchor then"
#endif
#define CALL(name, a, b, c, d) invoke(__NR_##name, (long)(a), (long)(b), (long)(c), (long)(d), 0, 0)

typedef int start_main(void *main, int count, char **arguments, void *init, void *fini, void *loader_fini, void *stack);
extern void *dlsym(void *where, const char *name);
extern char **__environ; /* What libc gives to `main` as the variables: the loader has set it. */

/* What starts bash, which the program's first instructions have called us with. */
static struct { start_main *function; void *main, *init, *fini, *loader_fini, *stack; } bash;
static struct prctl_mm_map memory; /* The addresses that /proc shows of this process (prctl(2), PR_SET_MM_MAP). */
static int *thread;                /* Where libc keeps the number of its thread. */
static int forks;                  /* Whether shells can be forks. */

struct started { int pid, code; };
/* The processes that were started here, in a ring. A code of -1 stands for a process that runs. */
static struct started started[STARTED];
static unsigned next_started;
static int wanted; /* The process whose exit code pid 1 waits for; 0 if it waits for none. */

static void leave(int code) {
    for (;;) CALL(exit_group, code, 0, 0, 0);
}

static void answer_on(int fd, unsigned number) {
    char line[12], *begin = line + sizeof line;
    *--begin = '\n';
    do *--begin = (char)('0' + number % 10);
    while (number /= 10);
    CALL(write, fd, begin, line + sizeof line - begin, 0);
}

static void answer(unsigned number) { answer_on(REPLIES, number); }

static void receive_from(int fd, char *to, unsigned long size) {
    while (size) {
        long count = CALL(read, fd, to, size, 0);
        /* Pid 1 is gone, or the agent has closed the pipe. */
        if (count <= 0) leave(1);
        to += count;
        size -= (unsigned long)count;
    }
}

static void receive(char *to, unsigned long size) { receive_from(REQUESTS, to, size); }

/* Return the number at a place, and move on behind it. */
static unsigned next_number(const char **text) {
    unsigned number = 0;
    while (**text >= '0' && **text <= '9') number = 10 * number + (unsigned)(*(*text)++ - '0');
    return number;
}

static unsigned target_of(const char *text) {
    unsigned target = 0;
    for (unsigned i = 1; i <= DIGITS; i++) target = 10 * target + (unsigned)(text[i] - '0');
    return target;
}

static int is_descriptor(const char *text) { return *text == '<' || *text == '>'; }

static unsigned number_at(const char *text) { return next_number(&text); }

/* The flags of a descriptor. No program that the agent starts gets those of ours. */
static int sharing(unsigned fd) { return fd >= OURS ? O_CLOEXEC : 0; }

/* In the child: lead a process group, and open its descriptors; return whether all could be opened. */
static int open_descriptors(char **texts) {
    /* A group of its own: `kill 0` in one session reaches no other. */
    CALL(setpgid, 0, 0, 0, 0);
    for (char **text = texts; is_descriptor(*text); text++) {
        /* Each is opened again, so the process shares no flags, offsets or locks with what is opened here. */
        long fd = CALL(openat, AT_FDCWD, *text + 1 + DIGITS, **text == '<' ? O_RDONLY : O_WRONLY, 0);
        if (fd < 0) return 0;
        if (fd == target_of(*text)) continue;
        if (CALL(dup3, fd, target_of(*text), sharing(target_of(*text)), 0) < 0) return 0;
        CALL(close, fd, 0, 0, 0);
    }
    return 1;
}

/* In the child: close all other descriptors, and block no signal. After the last one, `more` of them stay open. */
static void leave_the_anchor(char **texts, unsigned more) {
    unsigned long no_signals = 0;
    unsigned next = 0;
    /* They come in ascending order. */
    for (; is_descriptor(*texts); next = target_of(*texts++) + 1)
        if (target_of(*texts) > next) CALL(close_range, next, target_of(*texts) - 1, 0, 0);
    CALL(close_range, next + more, ~0U, 0, 0);
    CALL(rt_sigprocmask, SIG_SETMASK, &no_signals, 0, sizeof no_signals);
}

/* Read the number of a user or group, and move on behind it; return whether it is one. The highest number of the kernel's
 * means "no change" (setresuid(2)), with which a process would stay root. */
static int next_id(const char **text, unsigned *id) {
    const char *begin = *text;
    unsigned long number = 0;
    while (**text >= '0' && **text <= '9' && number < ~0U) number = 10 * number + (unsigned long)(*(*text)++ - '0');
    *id = (unsigned)number;
    return *text > begin && number < ~0U;
}

/* In the child: become a user; return whether it could be done. The order is that of credentials(7). */
static int become_user(const char *text) {
    static unsigned ids[2 + GROUPS];
    unsigned count = 0, uid, gid;
    do
        if (count == 2 + GROUPS || !next_id(&text, &ids[count++])) return 0;
    while (*text++ == ' ');
    if (text[-1] || count < 2) return 0;
    uid = ids[0], gid = ids[1];
    return CALL(setgroups, count - 2, ids + 2, 0, 0) == 0 && CALL(setresgid, gid, gid, gid, 0) == 0 &&
           CALL(setresuid, uid, uid, uid, 0) == 0;
}

static void note(int pid) {
    for (unsigned i = 0; i < STARTED; i++)
        if (started[i].pid == pid) started[i].pid = 0; /* The pid is used again. */
    /* Codes that nobody has asked for are forgotten when the ring is full, but no process that runs. */
    for (unsigned i = 0; i < STARTED && started[next_started % STARTED].pid && started[next_started % STARTED].code < 0; i++)
        next_started++;
    started[next_started++ % STARTED] = (struct started){pid, -1};
}

static int equal(const char *one, const char *other) {
    while (*one && *one == *other) one++, other++;
    return *one == *other;
}

static int begins(const char *text, const char *with) {
    while (*with && *text == *with) text++, with++;
    return !*with;
}

static long read_file(const char *path, void *to, long room) {
    long fd = CALL(openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0), size = 0, count = 1;
    if (fd < 0) return -1;
    while (size < room && (count = CALL(read, fd, (char *)to + size, room - size, 0)) > 0) size += count;
    CALL(close, fd, 0, 0, 0);
    return count < 0 ? -1 : size;
}

/* Read the addresses of this process; proc_pid_stat(5) has the numbers of the fields. */
static int read_memory(void) {
    static char text[2048];
    unsigned long fields[FIELDS] = {0};
    long size = read_file("/proc/self/stat", text, sizeof text - 1), field = 2;
    if (size <= 0) return 0;
    text[size] = 0;
    const char *at = text + size;
    /* The name may have blanks and parentheses; the last one ends it. */
    while (at > text && *at != ')') at--;
    for (; *at && field < FIELDS; at++) {
        if (*at == ' ') field++;
        else if (*at >= '0' && *at <= '9' && field < FIELDS) fields[field] = 10 * fields[field] + (unsigned)(*at - '0');
    }
    if (field < FIELDS - 1) return 0;
    memory.start_code = fields[26], memory.end_code = fields[27], memory.start_stack = fields[28];
    memory.start_data = fields[45], memory.end_data = fields[46], memory.start_brk = fields[47];
    memory.arg_start = fields[48], memory.arg_end = fields[49], memory.env_start = fields[50], memory.env_end = fields[51];
    memory.exe_fd = ~0U;
    return 1;
}

/* Have /proc show other arguments and variables; return whether the kernel does. */
static int show(const char *arguments, const char *arguments_end, const char *variables, const char *variables_end) {
    struct prctl_mm_map shown = memory;
    shown.brk = (unsigned long)CALL(brk, 0, 0, 0, 0);
    shown.arg_start = (unsigned long)arguments, shown.arg_end = (unsigned long)arguments_end;
    shown.env_start = (unsigned long)variables, shown.env_end = (unsigned long)variables_end;
    return invoke(__NR_prctl, PR_SET_MM, PR_SET_MM_MAP, (long)&shown, sizeof shown, 0, 0) == 0;
}

static long fork_with(long flags) {
    /* libc's own fork would do the same to its number of the thread. */
    flags |= CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | SIGCHLD;
#if defined(__x86_64__)
    return invoke(__NR_clone, flags, 0, 0, (long)thread, 0, 0);
#else
    return invoke(__NR_clone, flags, 0, 0, 0, (long)thread, 0);
#endif
}

static struct { const char *begin, *end; } own_arguments, own_variables; /* As a fork shows them. */

/* -- templates -----------------------------------------------------------------------------------------------------
 *
 * A template is a session's shell that waits where it would read its next command, and forks shells instead of going on.
 * A shell that was forked is what a new shell would be that becomes the same session: what bash has read of the sandbox,
 * restoring the session and its first dump were done once. sandboxes/guest/anchors/template.py decides when that holds.
 *
 * It hides as the anchor does. It holds no file of the sandbox, so that the layers can change below it: its directory is
 * the root, and what is mapped of the sandbox's files becomes memory of its own.
 *
 * A request is a 32-bit size and the path of the directory to begin in, with its NUL. The answer is one line with a
 * number: the new process, or 0 if it cannot be as wanted. The first line says that this is a template, and the second
 * one comes when it can fork: 1, or 0 if it cannot stand for new shells.
 */
enum { GO = OURS + 3, ITS_REQUESTS = OURS + 5, ITS_REPLIES = OURS + 6, WORD = 8 * sizeof(long), FOR_TEMPLATE = KIT + 8, MAX_MAPS = 1 << 16, PAGE = 4096 };
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
    char path[] = "/proc/self/fd/0000", *number = path + sizeof path - 1;
    for (int rest = fd, i = 0; i < DIGITS; i++, rest /= 10) *--number = (char)('0' + rest % 10);
    /* The names in that directory have no zero at the beginning. */
    while (*number == '0' && number[1]) {
        for (char *at = number; *at; at++) at[0] = at[1];
    }
    int writes = fd == 1 || fd == 2 || fd == GO + 1;
    long opened = CALL(openat, AT_FDCWD, fd ? path : "/dev/null", writes ? O_WRONLY : O_RDONLY, 0);
    int done = opened >= 0 && CALL(dup3, opened, fd, sharing((unsigned)fd), 0) == fd;
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
    if (!show(own_arguments.begin, own_arguments.end, own_variables.begin, own_variables.end)) return 0;
    answer_on(ITS_REPLIES, (unsigned)*inside.shell_pid);
    CALL(close_range, ITS_REQUESTS, ITS_REPLIES, 0, 0);
    CALL(prctl, PR_SET_NAME, "bash", 0, 0);
    CALL(rt_sigprocmask, SIG_SETMASK, signals, 0, sizeof *signals);
    /* Last, as in `begin_shell`. */
    CALL(prctl, PR_SET_DUMPABLE, 1, 0, 0);
    return 1;
}

/* Fork shells as long as pid 1 asks for some; return in each of them. */
static void serve_as_template(void) {
    unsigned long all = ~0UL, signals = 0;
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
        /* The anchor is its parent, as for each shell. */
        long pid = fork_with(CLONE_PARENT);
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
    if (is_template && count == GO + 1 && in && in[GO / WORD] >> GO % WORD & 1) serve_as_template();
    return inside.pselect(count, in, out, except, limit, signals);
}

/* -- shells --------------------------------------------------------------------------------------------------------- */

/* Let texts of a request follow each other without the letters before them; return where the last one ends. */
static char *compact(char **texts) {
    char *to = *texts;
    for (; *texts; texts++) {
        const char *from = *texts;
        *texts = to;
        while ((*to++ = *from++)) {}
    }
    return to;
}

/* In the fork: begin as a bash that has just been executed. */
__attribute__((noreturn)) static void begin_shell(char **texts, const char *folder, const char *user, char **words, char **variables, int template) {
    int count = 0;
    if (folder) CALL(chdir, folder, 0, 0, 0);
    if (!open_descriptors(texts) || (user && !become_user(user))) {
        answer(0);
        leave(NOT_FOUND);
    }
    if (template) expect_requests();
    answer((unsigned)CALL(getpid, 0, 0, 0, 0));
    leave_the_anchor(texts, template ? 2 : 0);
    while (words[count]) count++;
    own_arguments.begin = *words, own_arguments.end = compact(words);
    own_variables.begin = *variables ? *variables : *words;
    own_variables.end = *variables ? compact(variables) : *words;
    show(own_arguments.begin, own_arguments.end, own_variables.begin, own_variables.end);
    __environ = variables;
    CALL(prctl, PR_SET_NAME, "bash", 0, 0);
    /* Last: from here on a process of the agent may look into this one, which holds nothing of the anchor any more. */
    CALL(prctl, PR_SET_DUMPABLE, 1, 0, 0);
    bash.function(bash.main, count, words, bash.init, bash.fini, bash.loader_fini, bash.stack);
    for (;;) leave(NOT_FOUND);
}

static void collect(void);

/* Start a shell, which answers itself. */
static void start(char **texts, unsigned count, char **words) {
    unsigned first = 0, arguments = 0, variables = 0;
    const char *folder = 0, *user = 0;
    while (first < count && is_descriptor(texts[first])) first++;
    unsigned next = first;
    if (next < count && *texts[next] == 'd') folder = texts[next++] + 1;
    if (next < count && *texts[next] == 'u') user = texts[next++] + 1;
    for (; next < count && *texts[next] == 'a'; next++) words[arguments++] = texts[next] + 1;
    words[arguments] = 0;
    char **environment = words + arguments + 1;
    for (; next < count && *texts[next] == 'e'; next++) environment[variables++] = texts[next] + 1;
    environment[variables] = 0;
    /* No process begins before those are collected that had ended: `ps` would show zombies. */
    collect();
    long pid = forks && arguments ? fork_with(0) : -1;
    if (pid == 0) begin_shell(texts, folder, user, words, environment, *texts[next] == 't' && can_be_template());
    if (pid > 0) note((int)pid);
    else answer(0);
}

/* -- the anchor ----------------------------------------------------------------------------------------------------- */

/* The process as it was started here; 0 if it was not. */
static struct started *find(int pid) {
    for (unsigned i = 0; i < STARTED; i++)
        if (pid && started[i].pid == pid) return &started[i];
    return 0;
}

/* The next child that has ended, which is not collected by this; 0 if there is none, and negative if there is no child
 * at all, or not the one that is asked for. */
static int ended_child(int type, int pid) {
    siginfo_t ended;
    ended.si_pid = 0;
    long error = invoke(__NR_waitid, type, pid, (long)&ended, WEXITED | WNOHANG | WNOWAIT, 0, 0);
    return error ? (int)error : ended.si_pid;
}

static void obey(void);

/* Read what pid 1 has written so far. It tells of a fork before the fork can end by itself, so a child that is not known
 * then is none of its. */
static void read_on(void) {
    struct pollfd ready = {REQUESTS, POLLIN, 0};
    struct __kernel_timespec none = {0, 0};
    while (CALL(ppoll, &ready, 1, &none, 0) > 0) obey();
}

static void collect(void) {
    static int reading;
    int pid, status;
    while ((pid = ended_child(P_ALL, 0)) > 0) {
        /* Not again while a request is obeyed that was read here: pid 1 writes none before it has the answer. */
        if (!reading && !find(pid)) {
            reading = 1;
            read_on();
            reading = 0;
        }
        /* A request may have collected it. */
        if (CALL(wait4, pid, &status, WNOHANG, 0) != pid) continue;
        int code = (status & 0x7f) ? 128 + (status & 0x7f) : (status >> 8) & 0xff;
        struct started *known = find(pid);
        /* A code that is known stays: a pid may be used again by an orphan, before pid 1 asks for the code. */
        if (known && known->code < 0) known->code = code;
        if (pid == wanted) {
            wanted = 0;
            answer((unsigned)code);
        }
    }
}

static void tell(int pid) {
    collect();
    struct started *known = find(pid);
    if (known && known->code >= 0) answer((unsigned)known->code);
    else if (known && ended_child(P_PID, pid) >= 0) wanted = pid; /* It is about to end. */
    else answer(UNKNOWN);
}

static void obey(void) {
    unsigned head[2];
    receive((char *)head, sizeof head);
    unsigned long bytes = head[0], count = head[1];
    if (!bytes || !count || bytes > MAX_BYTES || count > MAX_TEXTS) leave(1);
    /* The texts, the addresses of all, and then room for arguments and variables with an end mark each. */
    unsigned long room = (bytes + 7) / 8 * 8, size = room + (2 * count + 3) * sizeof(char *);
    char *request = (char *)invoke(__NR_mmap, 0, (long)size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if ((unsigned long)request > -4096UL) leave(1);
    receive(request, bytes);
    request[bytes - 1] = 0;
    char **texts = (char **)(request + room), *text = request;
    for (unsigned long i = 0; i < count; i++) {
        texts[i] = text;
        while (text < request + bytes - 1 && *text) text++;
        if (text < request + bytes - 1) text++;
    }
    texts[count] = request + bytes - 1; /* An empty text, at which every search ends. */
    if (*texts[0] == 'w') tell((int)number_at(texts[0] + 1));
    else if (*texts[0] == 'n') note((int)number_at(texts[0] + 1));
    else if (*texts[0] == 'c') CALL(close_range, KIT, ~0U, 0, 0), answer(0);
    else start(texts, (unsigned)count, texts + count + 1);
    CALL(munmap, request, size, 0, 0);
}

__attribute__((noreturn)) static void serve(void) {
    unsigned long ended = 1UL << (SIGCHLD - 1);
    char events[128 * 8];
    /* Nothing of the agent runs yet, or pid 1 does not rely on this. From here on nothing of the agent's can enter this
     * process. So it never holds a file of the sandbox, and can stay when the layers change. */
    CALL(prctl, PR_SET_DUMPABLE, 0, 0, 0);
    CALL(prctl, PR_SET_NAME, "anchor", 0, 0);
    CALL(rt_sigprocmask, SIG_BLOCK, &ended, 0, sizeof ended);
    long signals = CALL(signalfd4, -1, &ended, sizeof ended, O_CLOEXEC | O_NONBLOCK);
    for (;;) {
        struct pollfd ready[2] = {{REQUESTS, POLLIN, 0}, {(int)signals, POLLIN, 0}};
        CALL(ppoll, ready, 2, 0, 0);
        /* First: a process that pid 1 has told of before it ended is known when it is collected. */
        if (ready[0].revents) obey();
        if (ready[1].revents) {
            CALL(read, signals, events, sizeof events, 0);
            collect();
        }
    }
}

/* Be the anchor. The first instructions of the program call this instead of libc's function of the same name. */
EXPORTED int __libc_start_main(void *main, int count, char **arguments, void *init, void *fini, void *loader_fini, void *stack) {
    /* On the stack, since /proc shows arguments in anonymous memory only. It is there as long as this process. */
    char name[] = "anchor";
    (void)count, (void)arguments;
    bash.function = (start_main *)dlsym(NEXT_LIBRARY, "__libc_start_main");
    bash.main = main, bash.init = init, bash.fini = fini, bash.loader_fini = loader_fini, bash.stack = stack;
    if (bash.function && read_memory() && CALL(prctl, PR_GET_TID_ADDRESS, &thread, 0, 0) == 0 && thread)
        forks = show(name, name + sizeof name, name, name) && find_inside();
    serve();
}
