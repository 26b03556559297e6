//! Threads that stand by for the many short parallel loops of one forward pass.
//!
//! A decode step has some hundred parallel loops of 100 µs each, and a fork through a work-stealing
//! deque costs several microseconds, more when the other thread has gone to sleep. So a pass
//! borrows the threads of the current rayon pool once ([`with_team`]); until it ends they spin on
//! one cache line, and a loop costs the transfer of a few cache lines ([`Team::for_each`]). Rayon
//! stays the owner of the threads: the number of threads is that of the pool, an idle program does
//! not spin, and a thread that is busy elsewhere is not waited for, because the calling thread can
//! do all work itself.

#![expect(
    unsafe_code,
    reason = "a borrowed closure is called by threads that outlive the borrow, never after it"
)]

#[cfg(test)]
mod model;
mod protocol;

use std::cell::Cell;
use std::marker::PhantomData;

use protocol::{Close, Shared};

/// Threads that wait for [`for_each`](Self::for_each); made by [`with_team`].
///
/// Not `Sync`: a task cannot start a loop of its own on the team that runs it.
#[derive(Debug)]
pub struct Team<'a> {
    shared: Option<&'a Shared>,
    threads: usize,
    not_sync: PhantomData<Cell<()>>,
}

/// Runs `f` with the threads of the current rayon pool standing by, the calling one among them.
///
/// In a pool of one thread, `f` runs where it is called. Costs one fork of rayon, and allocates
/// nothing when called from a thread of the pool.
pub fn with_team<R: Send>(f: impl FnOnce(&Team<'_>) -> R + Send) -> R {
    let threads = rayon::current_num_threads();
    if threads == 1 {
        return f(&Team::alone());
    }
    let shared = Shared::default();
    let lead = || {
        let _close = Close(&shared);
        f(&Team { shared: Some(&shared), threads, not_sync: PhantomData })
    };
    rayon::join(lead, || recruit(&shared, threads - 1)).0
}

/// Turns up to `helpers` threads of the pool into helpers until the team is dismissed.
fn recruit(shared: &Shared, helpers: usize) {
    if helpers == 1 {
        shared.help(helpers);
    } else {
        rayon::join(|| shared.help(helpers), || recruit(shared, helpers - 1));
    }
}

impl Team<'_> {
    /// The calling thread only.
    #[must_use]
    pub const fn alone() -> Self {
        Self { shared: None, threads: 1, not_sync: PhantomData }
    }

    /// Threads that may take part.
    #[must_use]
    pub const fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `task(i)` once for every `i` below `tasks`, in any order, on any of the threads.
    ///
    /// Each thread has a range of neighbouring tasks, which it takes in their order: what a task
    /// asks memory for ahead is for the next task of the same thread. A thread that is done helps
    /// the others.
    ///
    /// # Panics
    /// When a task panics; the others may then not have run.
    pub fn for_each<F: Fn(usize) + Sync>(&self, tasks: usize, task: F) {
        let Some(shared) = self.shared.filter(|_| tasks > 1) else {
            (0..tasks).for_each(task);
            return;
        };
        // SAFETY: `Team` is not `Sync`, and only the thread that made it has it.
        unsafe { shared.lead(self.threads, tasks, &task) };
    }

    /// Calls `f(i, chunk)` for the chunks of `len` elements of `data` (the last may be shorter).
    ///
    /// # Panics
    /// As [`for_each`](Self::for_each), and when `len` is zero.
    pub fn chunks<T: Send>(&self, data: &mut [T], len: usize, f: impl Fn(usize, &mut [T]) + Sync) {
        self.blocks(data, data.len().max(1), len, |_, from, chunk| f(from / len, chunk));
    }

    /// Calls `f(i, from, chunk)` for the chunks of `len` elements of every block `i` of `block`
    /// elements of `data`, with the place of the chunk in its block; the last chunk of a block, and
    /// the last block, may be shorter.
    ///
    /// # Panics
    /// As [`for_each`](Self::for_each), and when `block` or `len` is zero.
    pub fn blocks<T: Send>(
        &self,
        data: &mut [T],
        block: usize,
        len: usize,
        f: impl Fn(usize, usize, &mut [T]) + Sync,
    ) {
        assert!(block > 0 && len > 0, "Team: `block` and `len` should be positive");
        let start = Start(data.as_mut_ptr());
        let (total, each) = (data.len(), block.div_ceil(len));
        self.for_each(total.div_ceil(block) * each, |task| {
            let start = &start;
            let (i, from) = (task / each, task % each * len);
            let (first, end) = (i * block + from, total.min((i + 1) * block));
            if first < end {
                // SAFETY: `first..end` is inside `data`, which is borrowed for the loop, and every
                // task comes once.
                let chunk =
                    unsafe { std::slice::from_raw_parts_mut(start.0.add(first), len.min(end - first)) };
                f(i, from, chunk);
            }
        });
    }
}

struct Start<T>(*mut T);

// SAFETY: threads make disjoint slices of `T: Send` from it (see `Team::chunks`).
unsafe impl<T: Send> Sync for Start<T> {}

/// What the protocol stands on.
mod sync {
    use std::cell::UnsafeCell;
    pub(super) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};

    /// Polls before a thread offers its processor to others at every poll: some 50 µs.
    const POLLS: u32 = 4096;

    pub(super) fn poll(polls: &mut u32) {
        if *polls < POLLS {
            *polls += 1;
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }

    /// A value that one thread writes and others read, at times that somebody else orders.
    #[derive(Debug, Default)]
    pub(super) struct Slot<T>(UnsafeCell<T>);

    impl<T: Copy> Slot<T> {
        /// # Safety
        /// Nobody reads or writes it meanwhile.
        pub(super) unsafe fn set(&self, value: T) {
            // SAFETY: promised by the caller.
            unsafe { *self.0.get() = value };
        }

        /// # Safety
        /// Nobody writes it meanwhile.
        pub(super) unsafe fn get(&self) -> T {
            // SAFETY: promised by the caller.
            unsafe { *self.0.get() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn pool(threads: usize) -> rayon::ThreadPool {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
    }

    #[test]
    fn every_task_runs_once_in_every_loop() {
        for threads in [1, 2, 3, 7, 11] {
            pool(threads).install(|| {
                with_team(|team| {
                    assert_eq!(team.threads(), threads);
                    for round in 0..2000 {
                        let tasks = round % 17;
                        let mut counts = vec![0u32; tasks];
                        team.chunks(&mut counts, 1, |i, count| count[0] += u32::try_from(i).unwrap() + 1);
                        let want: Vec<u32> = (1..=u32::try_from(tasks).unwrap()).collect();
                        assert_eq!(counts, want, "{threads} threads, round {round}");
                    }
                });
            });
        }
    }

    #[test]
    fn chunks_cover_the_slice_with_a_shorter_last() {
        pool(2).install(|| {
            let mut data = vec![0; 103];
            with_team(|team| team.chunks(&mut data, 10, |i, chunk| chunk.fill(i + chunk.len())));
            let want: Vec<_> = (0..103).map(|at| at / 10 + if at < 100 { 10 } else { 3 }).collect();
            assert_eq!(data, want);
            with_team(|team| team.blocks(&mut data, 40, 15, |i, from, chunk| chunk.fill(1000 * i + from)));
            let want: Vec<_> = (0..103).map(|at| at / 40 * 1000 + at % 40 / 15 * 15).collect();
            assert_eq!(data, want);
        });
    }

    #[test]
    fn teams_do_not_wait_for_each_other() {
        // As many teams as threads, and teams within tasks of rayon: whoever finds no helper works
        // alone.
        pool(2).install(|| {
            let sum = |_| {
                let total = AtomicUsize::new(0);
                with_team(|team| {
                    for _ in 0..100 {
                        team.for_each(10, |i| {
                            total.fetch_add(i, Ordering::Relaxed);
                        });
                    }
                });
                total.into_inner()
            };
            let sums: Vec<usize> =
                rayon::iter::ParallelIterator::collect(rayon::iter::ParallelIterator::map(
                    rayon::iter::IntoParallelIterator::into_par_iter(0..20),
                    sum,
                ));
            assert_eq!(sums, [4500; 20]);
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        let pool = pool(2);
        for bad in [0, 5, 99] {
            let run = || {
                pool.install(|| {
                    with_team(|team| team.for_each(100, |i| assert!(i != bad, "task {i}")));
                });
            };
            let run = std::panic::AssertUnwindSafe(run);
            assert!(std::panic::catch_unwind(run).is_err(), "task {bad}");
        }
        let mut data = [1; 8];
        pool.install(|| with_team(|team| team.chunks(&mut data, 1, |_, x| x[0] += 1)));
        assert_eq!(data, [2; 8]);
    }
}
