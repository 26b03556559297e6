//! The protocol over the atomics of loom, which tries the orders that the memory model allows.

#[path = "protocol.rs"]
#[allow(clippy::duplicate_mod, reason = "the same lines over other atomics is what it is for")]
mod protocol;

mod sync {
    use loom::cell::UnsafeCell;
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};

    pub(super) fn poll(_: &mut u32) {
        loom::thread::yield_now();
    }

    #[derive(Debug, Default)]
    pub(super) struct Slot<T>(UnsafeCell<T>);

    impl<T: Copy> Slot<T> {
        pub(super) unsafe fn set(&self, value: T) {
            // SAFETY: loom fails the test where somebody else is at it.
            self.0.with_mut(|at| unsafe { *at = value });
        }

        pub(super) unsafe fn get(&self) -> T {
            // SAFETY: as above.
            self.0.with(|at| unsafe { *at })
        }
    }
}

use loom::cell::UnsafeCell;
use loom::sync::Arc;

use protocol::{Close, Shared};

/// Loops of so many tasks each, on `threads` threads: every task runs once, what it wrote is seen
/// behind the loop, and none still runs when its loop is over. Returns how many orders were tried.
///
/// Threads change places at most `preemptions` times where neither waits for the other.
fn explore(threads: usize, loops: &'static [usize], preemptions: Option<usize>) -> usize {
    let runs = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = runs.clone();
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(move || {
        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let shared = Arc::new(Shared::default());
        let helpers: Vec<_> = (1..threads)
            .map(|me| {
                let shared = shared.clone();
                loom::thread::spawn(move || shared.help(me))
            })
            .collect();
        let close = Close(&shared);
        for &tasks in loops {
            let lent =
                Lent { done: (0..tasks).map(|_| UnsafeCell::new(0)).collect(), one: UnsafeCell::new(1) };
            let task = |i: usize| {
                let lent = &lent;
                // SAFETY: loom fails the test where two threads are at one cell.
                let one = lent.one.with(|at| unsafe { *at });
                // SAFETY: as above.
                lent.done[i].with_mut(|at| unsafe { *at += one });
            };
            // SAFETY: this is the only leader.
            unsafe { shared.lead(threads, tasks, &task) };
            // SAFETY: as above: a task that still runs is at it, or at its `done`.
            lent.one.with_mut(|at| unsafe { *at = 0 });
            for (i, done) in lent.done.iter().enumerate() {
                // SAFETY: as above.
                let runs = done.with(|at| unsafe { *at });
                assert_eq!(runs, 1, "runs of task {i}");
            }
        }
        drop(close);
        helpers.into_iter().for_each(|helper| helper.join().unwrap());
    });
    runs.load(std::sync::atomic::Ordering::Relaxed)
}

/// What the tasks of a loop borrow from the leader.
struct Lent {
    done: Vec<UnsafeCell<u32>>,
    one: UnsafeCell<u32>,
}

// SAFETY: loom checks every access.
unsafe impl Sync for Lent {}

#[test]
fn one_helper_in_all_orders() {
    assert!(explore(2, &[2], None) > 100);
}

#[test]
fn loops_one_after_the_other() {
    assert!(explore(2, &[2, 1], Some(3)) > 100);
}

/// With more preemptions the helpers wait by turns until loom gives up.
#[test]
fn two_helpers() {
    assert!(explore(3, &[3], Some(1)) > 100);
}
