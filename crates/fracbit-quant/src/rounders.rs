//! What rounds tiles: one rounder per scheme, built on first use.

use fracbit_base::Scheme;
use fracbit_codebook::Rounder;
use fracbit_format::Codebook;
pub use fracbit_trellis::Effort;
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

/// Builds rounders elsewhere than on the processor; `None` leaves a scheme to the processor. They
/// should give the bytes of the processor's exact ones.
pub type Provider = Box<dyn Fn(Scheme) -> Option<Box<dyn Rounder>> + Send + Sync>;

/// Rounders of one effort. Each is built when it is first asked for and kept as long as this value
/// or a clone of it, which shares them: a trellis rounder owns tables of a few hundred kilobytes.
#[derive(Clone, Default)]
pub struct Rounders(Arc<Shared>);

#[derive(Default)]
struct Shared {
    effort: Effort,
    provider: Option<Provider>,
    built: Mutex<HashMap<Scheme, Arc<dyn Rounder>>>,
}

impl Rounders {
    /// Those of the processor, with this effort where the search of a scheme has several.
    #[must_use]
    pub fn new(effort: Effort) -> Self {
        Self(Arc::new(Shared { effort, ..Shared::default() }))
    }

    /// Exact ones: of `provider`, and of the processor where that has none.
    #[must_use]
    pub fn provided(provider: Provider) -> Self {
        Self(Arc::new(Shared { provider: Some(provider), ..Shared::default() }))
    }

    /// Whether some of them are a provider's, which may want many tiles at once.
    #[must_use]
    pub fn are_provided(&self) -> bool {
        self.0.provider.is_some()
    }

    /// How thoroughly they search.
    #[must_use]
    pub fn effort(&self) -> Effort {
        self.0.effort
    }

    /// The rounder of a scheme; `None` for one of several [components](Scheme::components), which
    /// uses their rounders, for schemes whose groups have a scale each (their scale and codes are
    /// found together), and for a scheme without a built-in codebook.
    #[must_use]
    pub fn get(&self, scheme: Scheme) -> Option<Arc<dyn Rounder>> {
        let Shared { effort, provider, built } = &*self.0;
        let mut built = built.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = built.get(&scheme) {
            return Some(Arc::clone(found));
        }
        let provided = provider.as_ref().and_then(|provide| provide(scheme));
        let trellis = || Some(Box::new(fracbit_trellis::rounder(scheme, *effort)?) as Box<dyn Rounder>);
        let rounder: Arc<dyn Rounder> =
            provided.or_else(|| fracbit_codebook::rounder(scheme)).or_else(trellis)?.into();
        built.insert(scheme, Arc::clone(&rounder));
        Some(rounder)
    }
}

impl fmt::Debug for Rounders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rounders").field("effort", &self.0.effort).finish_non_exhaustive()
    }
}

/// Whether the search of a scheme knows several efforts.
#[must_use]
pub fn has_efforts(scheme: Scheme) -> bool {
    scheme.code().is_some()
}

/// The built-in codebook of a scheme, without building its rounder; `None` as for
/// [`Rounders::get`].
#[must_use]
pub fn codebook(scheme: Scheme) -> Option<&'static Codebook> {
    fracbit_codebook::builtin(scheme).or_else(|| fracbit_trellis::builtin(scheme))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn rounders_are_built_once_and_belong_to_their_value() {
        let scheme: Scheme = "nuq-2".parse().expect("a scheme");
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        let provided = Rounders::provided(Box::new(move |scheme| {
            counted.fetch_add(1, Ordering::Relaxed);
            fracbit_codebook::rounder(scheme)
        }));
        let clone = provided.clone();
        let [first, again] = [&provided, &clone].map(|r| r.get(scheme).expect("a scalar code"));
        assert!(Arc::ptr_eq(&first, &again), "clones share");
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        // Another value has neither the provider nor what it built.
        let other = Rounders::new(Effort::Fast).get(scheme).expect("a scalar code");
        assert!(!Arc::ptr_eq(&first, &other));
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        assert_eq!((provided.effort(), Rounders::new(Effort::Fast).effort()), (Effort::Exact, Effort::Fast));
        assert!(provided.get("gnuq-4".parse().expect("a scheme")).is_none(), "groups find their scales too");
        // A provider that has none leaves it to the processor.
        assert!(Rounders::provided(Box::new(|_| None)).get(scheme).is_some());
    }
}
