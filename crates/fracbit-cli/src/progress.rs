//! Progress on standard error: a bar with the time left on a terminal, plain lines elsewhere. A
//! program that called the command is told instead.

use crate::Listener;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::{
    io::{self, IsTerminal, Write},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// At least this long between two lines of one stage.
const SHORTEST: Duration = Duration::from_secs(1);
/// After this long a line is due whatever the share done.
const LONGEST: Duration = Duration::from_secs(10);
const TEMPLATE: &str = "{msg} [{bar:30}] {percent:>3} %  {elapsed} gone, {eta} left";

/// Shows progress and notes.
pub(crate) struct Reporter {
    style: Style,
    bars: MultiProgress,
    stage: Mutex<Option<Stage>>,
    /// Who is told instead, and nothing shown.
    listener: Option<Listener>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Style {
    Quiet,
    Bar,
    Lines,
}

struct Stage {
    name: String,
    start: Instant,
    pace: Pace,
    bar: Option<ProgressBar>,
}

impl Reporter {
    pub(crate) fn new(quiet: bool) -> Self {
        let style = match (quiet, io::stderr().is_terminal()) {
            (true, _) => Style::Quiet,
            (false, true) => Style::Bar,
            (false, false) => Style::Lines,
        };
        Self { style, bars: MultiProgress::new(), stage: Mutex::new(None), listener: None }
    }

    /// Shows nothing and tells `listener`.
    pub(crate) fn to(listener: Listener) -> Self {
        Self { listener: Some(listener), ..Self::new(true) }
    }

    /// Whether a program is told, not a person.
    pub(crate) fn is_heard(&self) -> bool {
        self.listener.is_some()
    }

    /// The bars, for whoever else writes to standard error.
    pub(crate) fn bars(&self) -> MultiProgress {
        self.bars.clone()
    }

    /// Ends the stage that is open, if any, as done.
    pub(crate) fn finish(&self) {
        self.end(self.take(), "done in");
    }

    /// Ends the stage that is open, if any, as cut short.
    pub(crate) fn abandon(&self) {
        self.end(self.take(), "stopped after");
    }

    fn take(&self) -> Option<Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn end(&self, stage: Option<Stage>, how: &str) {
        let Some(stage) = stage else { return };
        if let Some(bar) = &stage.bar {
            bar.finish_and_clear();
            self.bars.remove(bar);
        }
        self.line(&format!("{}: {how} {}", stage.name, Span(stage.start.elapsed())));
    }

    fn line(&self, line: &str) {
        if self.style != Style::Quiet {
            // Standard error may be closed; that is no reason to stop.
            let _ = self.bars.suspend(|| writeln!(io::stderr(), "{line}"));
        }
    }
}

impl fracbit::Progress for Reporter {
    fn stage(&self, name: &str, total: u64) {
        if let Some(listener) = &self.listener {
            return listener.stage(name, total);
        }
        self.finish();
        let bar = (self.style == Style::Bar).then(|| {
            let style =
                ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = self.bars.add(ProgressBar::new(total)).with_style(style).with_message(name.to_owned());
            bar.enable_steady_tick(Duration::from_millis(250));
            bar
        });
        if self.style == Style::Lines {
            self.line(&format!("{name} ..."));
        }
        let stage = Stage { name: name.to_owned(), start: Instant::now(), pace: Pace::new(total), bar };
        *self.stage.lock().unwrap_or_else(PoisonError::into_inner) = Some(stage);
    }

    fn advance(&self, units: u64) {
        if let Some(listener) = &self.listener {
            return listener.advance(units);
        }
        let mut open = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(stage) = open.as_mut() else { return };
        let due = stage.pace.advance(units, stage.start.elapsed());
        if let Some(bar) = &stage.bar {
            bar.inc(units);
        } else if let Some(text) = due {
            self.line(&format!("{}: {text}", stage.name));
        }
        if stage.pace.complete() {
            let stage = open.take();
            drop(open);
            self.end(stage, "done in");
        }
    }

    fn note(&self, line: &str) {
        match &self.listener {
            Some(listener) => listener.note(line),
            None => self.line(line),
        }
    }
}

/// Decides when a line is due: at every tenth, but not more often than once in [`SHORTEST`], and
/// after [`LONGEST`].
#[derive(Clone, Debug)]
struct Pace {
    total: u64,
    done: u64,
    tenths: u64,
    last: Duration,
}

impl Pace {
    fn new(total: u64) -> Self {
        Self { total, done: 0, tenths: 0, last: Duration::ZERO }
    }

    fn complete(&self) -> bool {
        self.done >= self.total
    }

    fn advance(&mut self, units: u64, elapsed: Duration) -> Option<String> {
        self.done = self.done.saturating_add(units);
        if self.complete() {
            return None; // the end of the stage has a line of its own
        }
        #[expect(clippy::cast_precision_loss, reason = "a share to show")]
        let share = self.done as f64 / self.total as f64;
        let tenths = u64::try_from(u128::from(self.done) * 10 / u128::from(self.total)).unwrap_or(10);
        let waited = elapsed.saturating_sub(self.last);
        if waited < SHORTEST || (tenths == self.tenths && waited < LONGEST) {
            return None;
        }
        self.tenths = tenths;
        self.last = elapsed;
        if self.done == 0 {
            return Some(format!("0 %, {} gone", Span(elapsed)));
        }
        let left = Duration::try_from_secs_f64(elapsed.as_secs_f64() * (1.0 - share) / share)
            .unwrap_or(Duration::MAX);
        Some(format!("{:.0} %, {} gone, {} left", 100.0 * share, Span(elapsed), Span(left)))
    }
}

/// A duration for people.
pub(crate) struct Span(pub(crate) Duration);

impl std::fmt::Display for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let seconds = self.0.as_secs();
        match seconds {
            // 59.95 would show as 60.0.
            0..60 if self.0.as_millis() < 59_950 => write!(f, "{:.1} s", self.0.as_secs_f64()),
            0..3600 => write!(f, "{} min {:02} s", seconds.max(60) / 60, seconds.max(60) % 60),
            _ => write!(f, "{} h {:02} min", seconds / 3600, seconds % 3600 / 60),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn spans_read_well() {
        for (seconds, text) in [
            (0.0, "0.0 s"),
            (59.94, "59.9 s"),
            (59.96, "1 min 00 s"),
            (61.0, "1 min 01 s"),
            (3599.0, "59 min 59 s"),
            (3600.0, "1 h 00 min"),
            (90_000.0, "25 h 00 min"),
        ] {
            assert_eq!(Span(at(seconds)).to_string(), text);
        }
    }

    #[test]
    fn a_line_per_tenth() {
        let mut pace = Pace::new(100);
        let lines: Vec<_> = (1..=100u32).filter_map(|i| pace.advance(1, at(f64::from(i)))).collect();
        assert_eq!(lines.len(), 9, "{lines:?}");
        assert_eq!(lines[0], "10 %, 10.0 s gone, 1 min 30 s left");
        assert_eq!(lines[8], "90 %, 1 min 30 s gone, 10.0 s left");
        assert!(pace.complete());
    }

    #[test]
    fn short_stages_say_nothing_between_start_and_end() {
        let mut pace = Pace::new(10);
        assert!((1..=10u32).all(|i| pace.advance(1, at(0.09 * f64::from(i))).is_none()));
    }

    #[test]
    fn slow_stages_speak_every_ten_seconds() {
        let mut pace = Pace::new(1_000_000);
        let lines = (1..=60u32).filter_map(|i| pace.advance(1, at(f64::from(i)))).count();
        assert_eq!(lines, 6);
    }

    #[test]
    fn odd_totals_do_no_harm() {
        assert!(Pace::new(0).complete());
        assert_eq!(Pace::new(0).advance(5, at(100.0)), None);
        assert_eq!(Pace::new(u64::MAX).advance(0, at(20.0)).as_deref(), Some("0 %, 20.0 s gone"));
        let mut pace = Pace::new(u64::MAX);
        assert!(pace.advance(1, at(1e6)).is_some());
        assert_eq!(pace.advance(u64::MAX, at(2e6)), None);
    }
}
