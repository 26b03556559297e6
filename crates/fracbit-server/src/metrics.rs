//! What an operator wants to know, in the text format of Prometheus.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fracbit_engine::{Done, Engine, Output};
use fracbit_model::Runtime;

/// Upper ends of the buckets of histograms, in seconds.
const SECONDS: [f64; 15] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// How a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    /// By an end token or a stop text.
    Stop,
    /// With as many tokens as asked for.
    Length,
    /// The model failed.
    Failed,
    /// Its client went away.
    Unwanted,
    /// The server ended.
    GivenUp,
}

impl Outcome {
    const ALL: [Self; 5] = [Self::Stop, Self::Length, Self::Failed, Self::Unwanted, Self::GivenUp];

    fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Failed => "failed",
            Self::Unwanted => "disconnected",
            Self::GivenUp => "given_up",
        }
    }
}

#[derive(Debug, Default)]
struct Histogram {
    /// Values in each bucket; larger ones are in none.
    buckets: [u64; SECONDS.len()],
    count: u64,
    sum: f64,
}

impl Histogram {
    fn add(&mut self, value: Duration) {
        let value = value.as_secs_f64();
        if let Some(bucket) = SECONDS.iter().position(|&end| value <= end) {
            self.buckets[bucket] += 1;
        }
        self.count += 1;
        self.sum += value;
    }
}

#[derive(Debug, Default)]
struct Counts {
    responses: BTreeMap<u16, u64>,
    texts: BTreeMap<Outcome, u64>,
    reloads: BTreeMap<bool, u64>,
    /// Of each model that is there: of several, while one takes the place of another.
    engines: BTreeMap<u64, Held>,
    /// Engines so far.
    begun: u64,
    prompt: u64,
    cached: u64,
    generated: u64,
    guessed: u64,
    tried: u64,
    /// Of engines that are gone.
    preempted: usize,
    first: Histogram,
    between: Histogram,
}

/// What an engine holds.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    running: usize,
    waiting: usize,
    preempted: usize,
    pages: usize,
    free_pages: usize,
}

/// One engine's numbers among those of the server; gone with the engine.
#[derive(Debug)]
pub(crate) struct Measured {
    metrics: Arc<Metrics>,
    number: u64,
}

impl Measured {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Self {
        let number = {
            let mut counts = metrics.counts();
            counts.begun += 1;
            counts.begun
        };
        Self { metrics, number }
    }

    /// What the engine holds, and how many texts wait for it.
    pub(crate) fn engine<R: Runtime, O: Output>(&self, engine: &Engine<'_, R, O>, waiting: usize) {
        let held = Held {
            running: engine.sequences(),
            waiting,
            preempted: engine.preempted(),
            pages: engine.pool().pages(),
            free_pages: engine.pool().free(),
        };
        self.metrics.counts().engines.insert(self.number, held);
    }
}

impl Drop for Measured {
    fn drop(&mut self) {
        let mut counts = self.metrics.counts();
        let held = counts.engines.remove(&self.number).unwrap_or_default();
        counts.preempted += held.preempted;
    }
}

/// Counts since the server began.
#[derive(Debug, Default)]
pub(crate) struct Metrics(Mutex<Counts>);

impl Metrics {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        // Whoever panicked has added to a number or not.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request to the API was answered.
    pub(crate) fn answered(&self, status: u16) {
        *self.counts().responses.entry(status).or_default() += 1;
    }

    /// Texts that are being written.
    pub(crate) fn running(&self) -> usize {
        self.counts().engines.values().map(|held| held.running).sum()
    }

    /// Texts that wait for a place.
    pub(crate) fn waiting(&self) -> usize {
        self.counts().engines.values().map(|held| held.waiting).sum()
    }

    /// The model was loaded anew, or could not be.
    pub(crate) fn reloaded(&self, done: bool) {
        *self.counts().reloads.entry(done).or_default() += 1;
    }

    /// A token came, so long after the one before it, or after its request.
    pub(crate) fn token(&self, after: Duration, first: bool) {
        let mut counts = self.counts();
        if first { counts.first.add(after) } else { counts.between.add(after) }
    }

    /// A text has ended.
    pub(crate) fn ended(&self, outcome: Outcome) {
        *self.counts().texts.entry(outcome).or_default() += 1;
    }

    /// The tokens of a text that is done.
    pub(crate) fn counted(&self, done: &Done) {
        let mut counts = self.counts();
        counts.prompt += done.prompt as u64;
        counts.cached += done.cached as u64;
        counts.generated += done.tokens as u64;
        counts.guessed += done.guessed as u64;
        counts.tried += done.tried as u64;
    }

    /// All of it.
    pub(crate) fn text(&self) -> String {
        let counts = self.counts();
        let all = |of: fn(&Held) -> usize| counts.engines.values().map(of).sum::<usize>();
        let mut out = Page(String::new());
        out.family("requests_total", "counter", "Requests to the API by the status of their answer.");
        for (status, count) in &counts.responses {
            out.value("requests_total", &format!("{{status=\"{status}\"}}"), count);
        }
        out.family("texts_total", "counter", "Texts by how they ended.");
        for outcome in Outcome::ALL {
            let count = counts.texts.get(&outcome).copied().unwrap_or(0);
            out.value("texts_total", &format!("{{outcome=\"{}\"}}", outcome.name()), count);
        }
        out.one("texts_running", "gauge", "Texts that are being read or written.", all(|held| held.running));
        out.one("texts_waiting", "gauge", "Texts that wait for a place.", all(|held| held.waiting));
        out.one("prompt_tokens_total", "counter", "Tokens of prompts of texts that are done.", counts.prompt);
        let help = "Of those, tokens whose keys and values were there from another text.";
        out.one("cached_tokens_total", "counter", help, counts.cached);
        let help = "Tokens written, of texts that are done.";
        out.one("generated_tokens_total", "counter", help, counts.generated);
        let help = "Of those, tokens that were guessed ahead and took no step of their own.";
        out.one("accepted_guesses_total", "counter", help, counts.guessed);
        let help = "All tokens that were guessed ahead and run, for texts that are done.";
        out.one("guesses_total", "counter", help, counts.tried);
        let help = "Times that a text gave up its pages to another.";
        out.one("preemptions_total", "counter", help, counts.preempted + all(|held| held.preempted));
        out.family("cache_pages", "gauge", "Pages of the cache of keys and values.");
        out.value("cache_pages", "{state=\"held\"}", all(|held| held.pages - held.free_pages));
        out.value("cache_pages", "{state=\"free\"}", all(|held| held.free_pages));
        out.family("reloads_total", "counter", "Times that the model was loaded anew, or could not be.");
        for (done, name) in [(true, "done"), (false, "failed")] {
            let count = counts.reloads.get(&done).copied().unwrap_or(0);
            out.value("reloads_total", &format!("{{outcome=\"{name}\"}}"), count);
        }
        let help = "Seconds from a request to the first token of a text.";
        out.histogram("time_to_first_token_seconds", help, &counts.first);
        out.histogram("inter_token_seconds", "Seconds between two tokens of a text.", &counts.between);
        out.0
    }
}

/// A page in the making. Writing to a text never fails.
struct Page(String);

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP fracbit_{name} {help}\n# TYPE fracbit_{name} {kind}");
    }

    fn value(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = writeln!(self.0, "fracbit_{name}{labels} {value}");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.family(name, kind, help);
        self.value(name, "", value);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.family(name, "histogram", help);
        let bucket = format!("{name}_bucket");
        let mut below = 0;
        for (end, count) in SECONDS.iter().zip(histogram.buckets) {
            below += count;
            self.value(&bucket, &format!("{{le=\"{end}\"}}"), below);
        }
        self.value(&bucket, "{le=\"+Inf\"}", histogram.count);
        self.value(&format!("{name}_sum"), "", histogram.sum);
        self.value(&format!("{name}_count"), "", histogram.count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_count_all_that_is_smaller() {
        let metrics = Metrics::default();
        for millis in [1, 3, 80, 70_000] {
            metrics.token(Duration::from_millis(millis), true);
        }
        metrics.answered(200);
        metrics.ended(Outcome::Stop);
        let text = metrics.text();
        for line in [
            "fracbit_requests_total{status=\"200\"} 1",
            "fracbit_texts_total{outcome=\"stop\"} 1",
            "fracbit_texts_total{outcome=\"failed\"} 0",
            "fracbit_time_to_first_token_seconds_bucket{le=\"0.001\"} 1",
            "fracbit_time_to_first_token_seconds_bucket{le=\"0.005\"} 2",
            "fracbit_time_to_first_token_seconds_bucket{le=\"60\"} 3",
            "fracbit_time_to_first_token_seconds_bucket{le=\"+Inf\"} 4",
            "fracbit_time_to_first_token_seconds_sum 70.084",
            "fracbit_inter_token_seconds_count 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }
}
