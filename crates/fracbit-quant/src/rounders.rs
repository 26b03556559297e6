//! One rounder per scheme, built on first use.

use fracbit_base::Scheme;
use fracbit_codebook::Rounder;
use fracbit_format::Codebook;
pub use fracbit_trellis::Effort;
use std::{
    collections::HashMap,
    sync::{LazyLock, Mutex, OnceLock, PoisonError},
};

/// Rounders live as long as the program: a trellis rounder owns tables of a few hundred kilobytes, and at most
/// one per scheme of the palette and effort is ever built.
static ROUNDERS: LazyLock<Mutex<Rounders>> = LazyLock::new(Mutex::default);

type Rounders = HashMap<(Scheme, Effort), &'static dyn Rounder>;

/// Builds rounders elsewhere than on the processor; `None` leaves a scheme to the processor.
pub type Provider = Box<dyn Fn(Scheme) -> Option<Box<dyn Rounder>> + Send + Sync>;

static PROVIDER: OnceLock<Provider> = OnceLock::new();

/// Lets `provider` build the exact rounders from now on; they should give the bytes of the processor's. Only the first call counts, and
/// only for schemes that no one asked for before.
///
/// # Errors
/// Gives `provider` back when there is one already.
pub fn provide(provider: Provider) -> Result<(), Provider> {
    PROVIDER.set(provider)
}

/// The rounder of a scheme; `None` for one of several [components](Scheme::components), which uses their rounders, for schemes whose groups have a scale each (their scale and codes are found together), and for a
/// scheme without a built-in codebook.
#[must_use]
pub fn rounder(scheme: Scheme) -> Option<&'static dyn Rounder> {
    rounder_at(scheme, Effort::Exact)
}

/// As [`rounder`], with the given effort where the scheme's search has several.
#[must_use]
pub fn rounder_at(scheme: Scheme, effort: Effort) -> Option<&'static dyn Rounder> {
    let mut rounders = ROUNDERS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&found) = rounders.get(&(scheme, effort)) {
        return Some(found);
    }
    let provided = PROVIDER.get().filter(|_| effort == Effort::Exact).and_then(|provide| provide(scheme));
    let trellis = || Some(Box::new(fracbit_trellis::rounder(scheme, effort)?) as Box<dyn Rounder>);
    let built = provided.or_else(|| fracbit_codebook::rounder(scheme)).or_else(trellis)?;
    let built: &'static dyn Rounder = Box::leak(built);
    rounders.insert((scheme, effort), built);
    Some(built)
}

/// Whether the search of a scheme knows several efforts.
#[must_use]
pub fn has_efforts(scheme: Scheme) -> bool {
    scheme.code().is_some()
}

/// The built-in codebook of a scheme, without building its rounder; `None` as for [`rounder`].
#[must_use]
pub fn codebook(scheme: Scheme) -> Option<&'static Codebook> {
    fracbit_codebook::builtin(scheme).or_else(|| fracbit_trellis::builtin(scheme))
}
