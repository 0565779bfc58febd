/* The anchor of a local sandbox as a program of its own; sandboxes/guest/anchors/anchor.py has the other end and the theory.
 *
 * It starts bash for pid 1, inherits the orphans below it, collects all that end, and tells pid 1 exit codes. It needs
 * no libc and no loader, since it runs in sandboxes of every base, and because glibc's start alone takes 0.4 ms on a
 * virtual machine: it asks the CPU for its caches by an instruction that traps there. The library preloaded.c has this
 * code too, and starts most shells by a fork.
 *
 * It is confined as the agent's processes are. They can kill and stop it, but not trace it or open its descriptors.
 *
 * A request is two 32-bit numbers, the bytes of its texts and their number, and then the texts, each ending with NUL.
 * The first character of a text is its kind:
 *   < or >  a descriptor of the new process, with its number in two digits, and the path to open for it
 *   a, e    an argument and a variable of the new process
 *   t       last: the process is to be a template (template.c)
 *   w       the pid of a process whose exit code is wanted
 *   n       the pid of a process that a template has forked: its exit code will be wanted. There is no answer
 *   c       close the kit
 * The answer is one line with a number: the new process, 0 if it could not be started, or the exit code, UNKNOWN if this
 * anchor does not know it.
 */
#include <asm/unistd.h>
#include <linux/fcntl.h>
#include <linux/mman.h>
#include <linux/poll.h>
#include <linux/prctl.h>
#include <linux/sched.h>
#include <linux/signal.h>
#include <linux/time_types.h>
#include <linux/wait.h>

enum { REQUESTS = 3, REPLIES = 4, KIT = 40, MAX_TEXTS = 1 << 20, MAX_BYTES = 1 << 28, STARTED = 4096 };
#define PROGRAM "/bin/bash"
#define NOT_FOUND 127 /* The exit code of a program that cannot be executed. */
#define UNKNOWN 256   /* Told in place of the exit code of a process that this anchor has not started, or not collected. */

#if defined(__x86_64__)
#define START "_start: xor %ebp, %ebp\n and $-16, %rsp\n call serve\n"
static inline long invoke(long number, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
#elif defined(__aarch64__)
#define START "_start: mov x29, #0\n bl serve\n"
static inline long invoke(long number, long a, long b, long c, long d, long e, long f) {
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d, x4 __asm__("x4") = e, x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
}
#else
#error "no system calls of this machine are known here; bash is the anchor then"
#endif
#ifndef PRELOADED
__asm__(".globl _start\n" START);
#endif
#define CALL(name, a, b, c, d) invoke(__NR_##name, (long)(a), (long)(b), (long)(c), (long)(d), 0, 0)

struct started { int pid, code; };
/* The processes that were started here, in a ring. A code of -1 stands for a process that runs. */
static struct started started[STARTED];
static unsigned next_started;
static int wanted; /* The process whose exit code pid 1 waits for; 0 if it waits for none. */
static volatile int failed; /* Set by a child, on the memory that it shares, if it cannot become bash. */

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

static unsigned number_in(const char *text) {
    unsigned number = 0;
    while (*text >= '0' && *text <= '9') number = 10 * number + (unsigned)(*text++ - '0');
    return number;
}


static unsigned target_of(const char *text) { return 10 * (unsigned)(text[1] - '0') + (unsigned)(text[2] - '0'); }

static int is_descriptor(const char *text) { return *text == '<' || *text == '>'; }

static void fail(void) {
    failed = 1;
    leave(NOT_FOUND);
}

/* In the child: lead a process group, and open its descriptors; return whether all could be opened. */
static int open_descriptors(char **texts) {
    /* A group of its own: `kill 0` in one session reaches no other. */
    CALL(setpgid, 0, 0, 0, 0);
    for (char **text = texts; is_descriptor(*text); text++) {
        /* Each is opened again, so the process shares no flags, offsets or locks with what is opened here. */
        long fd = CALL(openat, AT_FDCWD, *text + 3, **text == '<' ? O_RDONLY : O_WRONLY, 0);
        if (fd < 0) return 0;
        if (fd == target_of(*text)) continue;
        if (CALL(dup3, fd, target_of(*text), 0, 0) < 0) return 0;
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

/* In the child: become bash. It runs on its parent's memory and stack, so it never returns, and the parent's frame
 * stays as it is. */
__attribute__((noinline, noreturn)) static void become(char **texts, char **arguments, char **environment) {
    if (!open_descriptors(texts)) fail();
    leave_the_anchor(texts, 0);
    CALL(execve, PROGRAM, arguments, environment, 0);
    fail();
    __builtin_unreachable();
}

static void note(int pid) {
    for (unsigned i = 0; i < STARTED; i++)
        if (started[i].pid == pid) started[i].pid = 0; /* The pid is used again. */
    /* Codes that nobody has asked for are forgotten when the ring is full, but no process that runs. */
    for (unsigned i = 0; i < STARTED && started[next_started % STARTED].pid && started[next_started % STARTED].code < 0; i++)
        next_started++;
    started[next_started++ % STARTED] = (struct started){pid, -1};
}

static void collect(void);
#ifdef PRELOADED
static int fork_shell(char **texts, char **words, char **environment, int template);
#endif

/* Start bash, as vfork does: this process goes on when the child has executed it, or has ended. */
static void start(char **texts, unsigned count, char **words) {
    unsigned first = 0, arguments = 0, variables = 0;
    while (first < count && is_descriptor(texts[first])) first++;
    for (unsigned i = first; i < count && *texts[i] == 'a'; i++) words[arguments++] = texts[i] + 1;
    words[arguments] = 0;
    char **environment = words + arguments + 1;
    for (unsigned i = first + arguments; i < count && *texts[i] == 'e'; i++) environment[variables++] = texts[i] + 1;
    environment[variables] = 0;
    failed = 0;
    /* No process begins before those are collected that had ended: `ps` would show zombies. */
    collect();
#ifdef PRELOADED
    if (fork_shell(texts, words, environment, *texts[first + arguments + variables] == 't')) return;
#endif
    long pid = CALL(clone, CLONE_VM | CLONE_VFORK | SIGCHLD, 0, 0, 0);
    if (pid == 0) become(texts, words, environment);
    if (pid > 0) note((int)pid);
    answer(pid > 0 && !failed ? (unsigned)pid : 0);
}

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
    if (*texts[0] == 'w') tell((int)number_in(texts[0] + 1));
    else if (*texts[0] == 'n') note((int)number_in(texts[0] + 1));
    else if (*texts[0] == 'c') CALL(close_range, KIT, ~0U, 0, 0), answer(0);
    else start(texts, (unsigned)count, texts + count + 1);
    CALL(munmap, request, size, 0, 0);
}

__attribute__((used, noreturn)) void serve(void) {
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
