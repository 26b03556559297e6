#![doc = include_str!("../README.md")]

mod schedule;
mod search;

pub use schedule::{Phase, Schedule, ScheduleError, Switch};
pub use search::{Found, cheapest};
