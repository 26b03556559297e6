//! How a leader and its helpers share loops, over the atomics of `super::sync`: those of the
//! standard library, or in a test those of loom, which tries all orders that the memory model
//! allows.
//!
//! The leader writes the job, then makes `epoch` odd: open. A helper that sees a new odd epoch
//! counts itself `busy` and looks at the epoch again; if it is still the same, it takes tasks. The
//! leader, out of tasks, makes the epoch even and waits until nobody is busy. Both sides write one
//! variable and then read the other with a sequentially consistent fence between: either the helper
//! sees the closed epoch and stays out, or the leader sees that it is busy.

use super::sync::{AtomicBool, AtomicUsize, Ordering, Slot, fence, poll};

/// What leader and helpers share; each part on a cache line (a pair of them, for the prefetcher) of
/// its own.
#[derive(Debug, Default)]
pub(super) struct Shared {
    epoch: Padded<AtomicUsize>,
    job: Slot<Job>,
    /// The next task of every range.
    next: [Padded<AtomicUsize>; RANGES],
    busy: Padded<AtomicUsize>,
    poisoned: AtomicBool,
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Padded<T>(T);

/// Ranges that the tasks of a loop are cut into, at most.
const RANGES: usize = 8;

/// The epoch that sends helpers home.
const CLOSED: usize = usize::MAX;

/// A borrowed `Fn(usize)` without its lifetime.
#[derive(Clone, Copy, Debug)]
struct Job {
    data: *const (),
    call: unsafe fn(*const (), usize),
    tasks: usize,
    ranges: usize,
}

impl Job {
    /// The tasks of range `i`.
    const fn range(&self, i: usize) -> std::ops::Range<usize> {
        i * self.tasks / self.ranges..(i + 1) * self.tasks / self.ranges
    }
}

impl Default for Job {
    fn default() -> Self {
        Self { data: std::ptr::null(), call: |_, _| (), tasks: 0, ranges: 1 }
    }
}

// SAFETY: `job` is written by the leader while the epoch is even and nobody is busy, and read by
// helpers that are busy in an odd epoch (see the module). The closure behind it is `Sync`.
unsafe impl Sync for Shared {}

// SAFETY: as above; nothing here belongs to a thread.
unsafe impl Send for Shared {}

/// Sends the helpers home, also when the leader panics: rayon waits for them.
pub(super) struct Close<'a>(pub(super) &'a Shared);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        self.0.epoch.0.store(CLOSED, Ordering::Release);
    }
}

/// Ends a loop: no helper enters any more, and those inside are waited for.
struct End<'a> {
    shared: &'a Shared,
    epoch: usize,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.shared.epoch.0.store(self.epoch, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut polls = 0;
        while self.shared.busy.0.load(Ordering::Acquire) > 0 {
            poll(&mut polls);
        }
    }
}

/// Counts a helper out; a helper that unwinds tells the leader.
struct Leave<'a>(&'a Shared);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.poisoned.store(true, Ordering::Relaxed);
        }
        self.0.busy.0.fetch_sub(1, Ordering::Release);
    }
}

impl Shared {
    /// Calls `task(i)` once for every `i` below `tasks`, cut into a range for each of `threads`.
    ///
    /// # Safety
    /// One thread only, the leader, calls it.
    ///
    /// # Panics
    /// When a task panics; the others may then not have run.
    pub(super) unsafe fn lead<F: Fn(usize) + Sync>(&self, threads: usize, tasks: usize, task: &F) {
        /// # Safety
        /// `data` points to a live `F`.
        unsafe fn call<F: Fn(usize)>(data: *const (), i: usize) {
            // SAFETY: promised by the caller.
            unsafe { (*data.cast::<F>())(i) }
        }
        let ranges = threads.min(RANGES);
        let job = Job { data: std::ptr::from_ref(task).cast(), call: call::<F>, tasks, ranges };
        let epoch = self.epoch.0.load(Ordering::Relaxed);
        // SAFETY: the epoch is even and nobody is busy: there is one leader (promised), and the end
        // of the loop before waited for both.
        unsafe { self.job.set(job) };
        for (i, next) in self.next[..ranges].iter().enumerate() {
            next.0.store(job.range(i).start, Ordering::Relaxed);
        }
        self.epoch.0.store(epoch + 1, Ordering::Release);
        // Waits for the helpers even when a task panics here: they hold `task`.
        let end = End { shared: self, epoch: epoch + 2 };
        self.drain(job, 0);
        drop(end);
        assert!(!self.poisoned.load(Ordering::Relaxed), "a task of this loop panicked on another thread");
    }

    /// The work of helper `me`, from 1 on (the leader is 0), until the team is dismissed.
    pub(super) fn help(&self, me: usize) {
        let (mut seen, mut polls) = (0, 0);
        loop {
            let epoch = self.epoch.0.load(Ordering::Acquire);
            if epoch == CLOSED {
                return;
            }
            if epoch % 2 == 1 && epoch != seen {
                self.busy.0.fetch_add(1, Ordering::Relaxed);
                let leave = Leave(self);
                fence(Ordering::SeqCst);
                if self.epoch.0.load(Ordering::Acquire) == epoch {
                    // SAFETY: busy in the epoch of this job: the leader waits before it writes
                    // another.
                    let job = unsafe { self.job.get() };
                    self.drain(job, me);
                    seen = epoch;
                }
                drop(leave);
                polls = 0;
            }
            poll(&mut polls);
        }
    }

    /// Takes tasks until all are taken, first those of the range of thread `me`.
    fn drain(&self, job: Job, me: usize) {
        for i in 0..job.ranges {
            let range = (me + i) % job.ranges;
            let (next, end) = (&self.next[range].0, job.range(range).end);
            // Looks before it takes: threads that find nothing left do not write what others read.
            while next.load(Ordering::Relaxed) < end {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task < end {
                    // SAFETY: the closure lives until `lead` returns, and that waits for all that
                    // are busy.
                    unsafe { (job.call)(job.data, task) };
                }
            }
        }
    }
}
