//! How long-running verbs tell how far they are.

/// Receives progress; called from any thread. Implementations show a bar or print lines, and may
/// unwind (`std::panic::resume_unwind`) to stop the work.
pub trait Progress: Sync {
    /// A stage begins; `total` units of work follow.
    fn stage(&self, name: &str, total: u64);
    /// `units` more are done; 0 before work that takes long.
    fn advance(&self, units: u64);
    /// Something worth a line.
    fn note(&self, line: &str);
}

/// Tells nobody.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quiet;

impl Progress for Quiet {
    fn stage(&self, _name: &str, _total: u64) {}
    fn advance(&self, _units: u64) {}
    fn note(&self, _line: &str) {}
}
