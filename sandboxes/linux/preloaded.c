/* The anchor of a local sandbox as a bash that stops before its first statement; sandboxes/shell_files/copies.py has the
 * theory. This library is loaded into a bash (LD_PRELOAD, ld.so(8)), which then is the anchor of anchor.c.
 *
 * A shell is a fork of it that goes on to the `main` of bash, as if it had just been executed: with arguments, variables
 * and descriptors of its own, and no memory of another shell. What executing bash takes, and loading its libraries, was
 * done once. A shell that the fork cannot stand for is executed, as by anchor.c:
 *
 * 1. It has other arguments than this process was started with, or variables that the loader of programs reads.
 * 2. The sandbox's bash, or a file that loading it involves, is another one than those that were loaded here.
 * 3. The kernel cannot show the fork's own variables in /proc/PID/environ.
 *
 * It needs no libc of its own: that of the bash is there, but has not begun yet.
 */
#define PRELOADED
#include "anchor.c"

#include <asm/stat.h>
#include <linux/time.h>

#define FACTS "/dev/.shell/facts"
#ifndef PR_GET_TID_ADDRESS
#define PR_GET_TID_ADDRESS 40
#endif
#define ANY_LIBRARY ((void *)0) /* RTLD_DEFAULT and RTLD_NEXT of dlsym(3). */
#define NEXT_LIBRARY ((void *)-1L)
enum { MAX_FILES = 32, PATH = 128, FIELDS = 52 };

typedef int start_main(void *main, int count, char **arguments, void *init, void *fini, void *loader_fini, void *stack);
extern void *dlsym(void *where, const char *name);
extern char **__environ; /* What libc gives to `main` as the variables: the loader has set it. */
#define EXPORTED __attribute__((visibility("default")))

/* What starts bash, which the program's first instructions have called us with. */
static struct { start_main *function; void *main, *init, *fini, *loader_fini, *stack; char **arguments; int count; } bash;

/* A file that loading bash involves, as it was; shell_files/facts.py writes these. A size of -1: there was none. */
struct file { char path[PATH]; long size, modified_s, modified_ns, changed_s, changed_ns; };
static struct file files[MAX_FILES];
static long known_files;

static struct prctl_mm_map memory; /* The addresses that /proc shows of this process (prctl(2), PR_SET_MM_MAP). */
static char *own_arguments, *end_of_arguments; /* As this process was started. */
static int *thread; /* Where libc keeps the number of its thread. */
static int forks; /* Whether shells can be forks. */

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

/* Whether all files are as they were when bash was loaded here. 2 microseconds each. */
static int files_are_known(void) {
    for (long i = 0; i < known_files; i++) {
        const struct file *file = &files[i];
        struct stat now;
        long error = CALL(newfstatat, AT_FDCWD, file->path, &now, 0);
        if (file->size < 0 ? error != -2 : error || now.st_size != file->size) return 0; /* -2: ENOENT */
        if (file->size < 0) continue;
        if ((long)now.st_mtime != file->modified_s || (long)now.st_mtime_nsec != file->modified_ns) return 0;
        if ((long)now.st_ctime != file->changed_s || (long)now.st_ctime_nsec != file->changed_ns) return 0;
    }
    return 1;
}

/* Whether a fork can stand for this shell. */
static int can_fork(char **texts, char **arguments, char **variables) {
    if (!forks) return 0;
    for (; is_descriptor(*texts); texts++)
        /* The fork needs the pipe to pid 1 until its own descriptors are open. */
        if (target_of(*texts) == REPLIES) return 0;
    for (int i = 0; i <= bash.count; i++) {
        if (!arguments[i] || !bash.arguments[i]) {
            if (arguments[i] != bash.arguments[i]) return 0;
        } else if (!equal(arguments[i], bash.arguments[i])) return 0;
    }
    /* The loader, and the parts of libc that begin before the program, read these (ld.so(8)). */
    for (; *variables; variables++)
        if (begins(*variables, "LD_") || begins(*variables, "GLIBC_") || begins(*variables, "MALLOC_")) return 0;
    return files_are_known();
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

static struct { const char *begin, *end; } own_variables; /* As a fork shows them. */

#include "template.c"

/* In the fork: begin as a bash that has just been executed. */
__attribute__((noreturn)) static void begin_shell(char **texts, char **words, char **variables, int template) {
    if (!open_descriptors(texts)) {
        answer(0);
        leave(NOT_FOUND);
    }
    if (template) expect_requests();
    answer((unsigned)CALL(getpid, 0, 0, 0, 0));
    leave_the_anchor(texts, template ? 2 : 0);
    /* In the request a letter comes before each variable; in /proc/PID/environ they follow each other. */
    char *first = *variables ? *variables : own_arguments, *to = first;
    for (char **variable = variables; *variable; variable++) {
        const char *from = *variable;
        *variable = to;
        while ((*to++ = *from++)) {}
    }
    own_variables.begin = first, own_variables.end = to;
    show(own_arguments, end_of_arguments, first, to);
    __environ = variables;
    CALL(prctl, PR_SET_NAME, "bash", 0, 0);
    /* Last: from here on a process of the agent may look into this one, which holds nothing of the anchor any more. */
    CALL(prctl, PR_SET_DUMPABLE, 1, 0, 0);
    bash.function(bash.main, bash.count, words, bash.init, bash.fini, bash.loader_fini, bash.stack);
    for (;;) leave(NOT_FOUND);
}

/* Start a shell by a fork, which answers; return whether that could be done. */
static int fork_shell(char **texts, char **words, char **environment, int template) {
    if (!can_fork(texts, words, environment)) return 0;
    long pid = fork_with(0);
    if (pid == 0) begin_shell(texts, words, environment, template && can_be_template());
    if (pid > 0) note((int)pid);
    return pid > 0;
}

/* Be the anchor. The first instructions of the program call this instead of libc's function of the same name. */
EXPORTED int __libc_start_main(void *main, int count, char **arguments, void *init,
                                                            void *fini, void *loader_fini, void *stack) {
    /* On the stack, since /proc shows arguments in anonymous memory only. It is there as long as this process. */
    char name[] = "anchor";
    bash.function = (start_main *)dlsym(NEXT_LIBRARY, "__libc_start_main");
    bash.main = main, bash.count = count, bash.arguments = arguments;
    bash.init = init, bash.fini = fini, bash.loader_fini = loader_fini, bash.stack = stack;
    long size = read_file(FACTS, files, sizeof files);
    known_files = size > 0 && size % (long)sizeof *files == 0 ? size / (long)sizeof *files : 0;
    if (bash.function && known_files && read_memory() && CALL(prctl, PR_GET_TID_ADDRESS, &thread, 0, 0) == 0 && thread) {
        own_arguments = (char *)memory.arg_start, end_of_arguments = (char *)memory.arg_end;
        forks = show(name, name + sizeof name, name, name) && find_inside();
    }
    serve();
}
