/* Calls a handler of signals that reads memory which may not be there. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>

typedef void handler(int, siginfo_t *, void *);

enum { FAULTS = 2 };
static const int faults[FAULTS] = {SIGSEGV, SIGBUS};
static struct sigaction before[FAULTS];
static pthread_t guarded;
static sigjmp_buf back;

static void on_fault(int number, siginfo_t *info, void *context) {
    if (pthread_equal(pthread_self(), guarded))
        siglongjmp(back, 1);
    /* Another thread's own: it is what it would have been without us. */
    const struct sigaction *action = &before[number == faults[1]];
    if (action->sa_flags & SA_SIGINFO)
        action->sa_sigaction(number, info, context);
    else if (action->sa_handler == SIG_DFL || action->sa_handler == SIG_IGN)
        sigaction(number, action, NULL); /* and it comes again */
    else
        action->sa_handler(number);
}

/* Whether the handler has returned; if not, it has met memory that is not there. For one thread at a time. */
int mpi4jax_guarded(handler *call, int number, siginfo_t *info, void *context) {
    const int error = errno;
    volatile int returned = 0;
    struct sigaction ours;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_fault;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    guarded = pthread_self();
    if (sigsetjmp(back, 1) == 0) {
        for (int i = 0; i < FAULTS; i++)
            sigaction(faults[i], &ours, &before[i]);
        call(number, info, context);
        returned = 1;
    }
    for (int i = 0; i < FAULTS; i++)
        sigaction(faults[i], &before[i], NULL);
    errno = error;
    return returned;
}
