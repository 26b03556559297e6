//! Memory that a command may take: who asks for more is refused before work begins, not killed in
//! its middle.

use crate::failure::{Exit, Failure};
use fracbit_base::Bytes;
use serde::Serialize;
use std::{fs, path::Path, thread::available_parallelism};

/// Memory in bytes, as the system tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Memory {
    pub(crate) all: Bytes,
    /// Of all, what programs can still have.
    pub(crate) available: Bytes,
    /// What is free of the space on disk that takes pages for which memory has no room.
    pub(crate) swap: Bytes,
    /// What a container may have, where there is a limit below all.
    pub(crate) limit: Option<Bytes>,
    /// What is left of that limit: caches of files give way, what programs hold does not.
    pub(crate) left_of_limit: Option<Bytes>,
    /// What is left of the process's own limit, `ulimit -v`, where it has one. Mapped files count.
    pub(crate) left_to_process: Option<Bytes>,
}

impl Memory {
    /// That of the machine, of the container and of this process.
    pub(crate) fn now() -> Option<Self> {
        let read = |path: &Path| fs::read_to_string(path).ok();
        let proc = |name: &str| read(&Path::new("/proc").join(name));
        let info = proc("meminfo")?;
        let of = |name: &str| kilobytes(&info, name).map(|kb| Bytes(kb << 10));
        let (all, available) = (of("MemTotal:")?, of("MemAvailable:")?);
        // Version 2 has one line, `0::/path`; within a container the path is often the root.
        let group = proc("self/cgroup").unwrap_or_default();
        let path = group.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
        let root = Path::new("/sys/fs/cgroup");
        let of_group = |dir: &Path| {
            let limit: u64 = read(&dir.join("memory.max"))?.trim().parse().ok()?;
            let held = read(&dir.join("memory.stat")).map_or(0, |stat| held(&stat));
            Some((limit, limit.saturating_sub(held)))
        };
        let group = [root.join(path), root.to_owned()].iter().filter_map(|dir| of_group(dir)).min();
        let group = group.filter(|&(limit, _)| limit < all.0);
        let limits = proc("self/limits").and_then(|limits| soft_limit(&limits, "Max address space"));
        let taken = proc("self/status").and_then(|status| kilobytes(&status, "VmSize:"));
        Some(Self {
            all,
            available,
            swap: of("SwapFree:").unwrap_or(Bytes(0)),
            limit: group.map(|(limit, _)| Bytes(limit)),
            left_of_limit: group.map(|(_, left)| Bytes(left)),
            left_to_process: limits.map(|limit| Bytes(limit.saturating_sub(taken.map_or(0, |kb| kb << 10)))),
        })
    }

    /// What a model and its cache may take.
    pub(crate) fn usable(self) -> Bytes {
        self.least(self.available)
    }

    /// The tightest of the limits and of what the machine has.
    fn least(self, machine: Bytes) -> Bytes {
        [self.left_of_limit, self.left_to_process].into_iter().flatten().fold(machine, Ord::min)
    }

    /// As [`threads`], beside one that loads a model meanwhile.
    fn threads(self, asked: Option<usize>, cores: usize) -> Result<usize, Failure> {
        let room = self.left_to_process.map_or(u64::MAX, |left| left.0 / THREAD.0);
        let held = usize::try_from(room).unwrap_or(usize::MAX).saturating_sub(1);
        let count = asked.unwrap_or_else(|| cores.min(held.max(1)));
        if count <= held {
            return Ok(count);
        }
        let need = Bytes((count as u64).saturating_add(1).saturating_mul(THREAD.0));
        // What is reserved is no memory of the machine.
        let limit = Self { available: Bytes(u64::MAX), swap: Bytes(0), left_of_limit: None, ..self };
        let fewer = "`--threads` says how many compute";
        limit.holds(need, "starting threads").map_err(|e| if count > 1 { e.hint(fewer) } else { e })?;
        Ok(count)
    }

    fn holds(self, need: Bytes, doing: &str) -> Result<(), Failure> {
        // Slow is better than not at all.
        let room = self.least(Bytes(self.available.0 + self.swap.0));
        if need <= room {
            return Ok(());
        }
        let whose = if self.left_to_process == Some(room) {
            "within the process's limit (`ulimit -v`)"
        } else if self.left_of_limit == Some(room) {
            "within the container's limit"
        } else {
            "on this machine"
        };
        let why = format!("memory: {doing} takes about {need}, {room} are available {whose}");
        Err(Failure::new(Exit::Failed, anyhow::Error::msg(why)))
    }
}

/// Refuses what takes more than there is, where the system tells how much that is.
pub(crate) fn enough(need: Bytes, doing: &str) -> Result<(), Failure> {
    Memory::now().map_or(Ok(()), |memory| memory.holds(need, doing))
}

/// What a thread may take of a process's limit before it computes: a stack of 2 MiB, and what glibc
/// reserves to cut a heap of 64 MiB out of at a multiple of its size. An allocation that another
/// thread makes meanwhile ends the program.
const THREAD: Bytes = Bytes(130 << 20);

/// How many threads compute: those that were asked for, if the process's limit (`ulimit -v`) holds
/// them, else as many as it holds; `None` where nothing says how many.
pub(crate) fn threads(asked: Option<usize>) -> Result<Option<usize>, Failure> {
    match Memory::now() {
        Some(memory) if memory.left_to_process.is_some() => {
            memory.threads(asked, available_parallelism().map_or(1, usize::from)).map(Some)
        }
        _ => Ok(asked),
    }
}

/// Refuses a measurement whose buffers have no place.
pub(crate) fn walked(bytes: Bytes) -> Result<(), Failure> {
    enough(bytes, "what is walked through").map_err(|e| e.hint("`--bytes` says how much that is"))
}

/// A line of `/proc/meminfo` or `/proc/self/status`.
fn kilobytes(info: &str, name: &str) -> Option<u64> {
    info.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse().ok())
}

/// Bytes of a group (`memory.stat`) that do not give way.
fn held(stat: &str) -> u64 {
    let of = |line: &str| {
        let (name, bytes) = line.split_once(' ')?;
        ["anon", "shmem", "kernel"].contains(&name).then(|| bytes.trim().parse().ok())?
    };
    stat.lines().filter_map(of).fold(0, u64::saturating_add)
}

/// The limit that holds now, of `/proc/self/limits`.
pub(crate) fn soft_limit(limits: &str, name: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_system_are_read() {
        let info = "MemTotal:       24117240 kB\nMemFree:         1 kB\nMemAvailable:   20000000 kB\n";
        assert_eq!(kilobytes(info, "MemAvailable:"), Some(20_000_000));
        assert_eq!(kilobytes(info, "MemTot:"), None);
        let limits = "Limit                     Soft Limit           Hard Limit           Units\n\
                      Max address space         unlimited            unlimited            bytes\n\
                      Max open files            1024                 524288               files\n";
        assert_eq!(soft_limit(limits, "Max open files"), Some(1024));
        assert_eq!(soft_limit(limits, "Max address space"), None);
        assert_eq!(held("anon 5\nfile 1000\nkernel 7\nkernel_stack 100\nshmem 1\n"), 13);
    }

    #[test]
    fn the_tightest_limit_counts_and_is_named() {
        let gb = |n: u64| Bytes(n << 30);
        let free = Memory {
            all: gb(9),
            available: gb(5),
            swap: gb(0),
            limit: None,
            left_of_limit: None,
            left_to_process: None,
        };
        let container = Memory { limit: Some(gb(4)), left_of_limit: Some(gb(3)), ..free };
        let process = Memory { left_to_process: Some(gb(2)), ..container };
        for (memory, left, whose) in [
            (free, 5, "on this machine"),
            (container, 3, "within the container's limit"),
            (process, 2, "`ulimit -v`"),
        ] {
            assert_eq!(memory.usable(), gb(left));
            assert!(memory.holds(gb(left), "running").is_ok());
            let refused = memory.holds(gb(left + 1), "running").unwrap_err().line();
            assert!(refused.contains(whose) && refused.contains("running takes about"), "{refused}");
        }
        // A thread has room, and one that loads a model: all that are asked for, or as many as fit.
        let megabytes = |n: u64| Memory { left_to_process: Some(Bytes(n << 20)), ..free };
        for (left, asked, cores, count) in [
            (259, None, 1, None),
            (260, None, 64, Some(1)),
            (1000, None, 64, Some(6)),
            (1000, None, 2, Some(2)),
            (1000, Some(6), 2, Some(6)),
            (1000, Some(7), 64, None),
            (u64::MAX >> 20, Some(usize::MAX), 2, None),
        ] {
            let told = megabytes(left).threads(asked, cores);
            assert_eq!(told.as_ref().ok().copied(), count, "{left} {asked:?} {cores}");
            if let Err(refused) = told {
                assert!(refused.line().contains("`ulimit -v`"), "{}", refused.line());
            }
        }
        // What swaps is slow, but runs; nobody is advised to.
        let swaps = Memory { swap: gb(1), ..free };
        assert_eq!(swaps.usable(), gb(5));
        assert!(swaps.holds(gb(6), "running").is_ok() && swaps.holds(gb(7), "running").is_err());
    }
}
