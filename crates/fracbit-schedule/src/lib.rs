#![doc = include_str!("../README.md")]

mod learned;
mod schedule;
mod scheduler;
mod search;
mod train;

pub use learned::{Features, Learned, Network, Shape};
pub use schedule::{Phase, Schedule, ScheduleError, Switch};
pub use scheduler::Scheduler;
pub use search::{Found, cheapest};
pub use train::{AdamOptions, Sample, train};
