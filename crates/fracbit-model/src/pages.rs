//! Pages of the cache: where states take them from, and how they share them.
//!
//! A state holds a list of pages of [`KvPool::POSITIONS`] positions, each with keys and values of
//! all layers (`crate::kv`). States with the same beginning may hold the same pages: what is
//! written goes to a copy, so at most one page of a state is not whole, and none is ever written
//! that another holds (copy on write). Pages come from a [`KvPool`], which has at most so many;
//! memory of pages that nobody holds any more is used again.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use fracbit_io::ModelConfig;
use fracbit_kernels::{Buffer, Line};

use crate::Error;
use crate::kv::{KvLayout, KvType, PAGE};

/// Pages for the states of a model; clones are the same pool.
#[derive(Clone, Debug)]
pub struct KvPool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    layout: KvLayout,
    most: usize,
    memory: Mutex<Memory>,
}

#[derive(Debug, Default)]
struct Memory {
    /// Of pages that nobody holds.
    free: Vec<Buffer>,
    taken: usize,
}

/// Keys and values of [`KvPool::POSITIONS`] positions in all layers, shared by whoever holds it.
#[derive(Clone, Debug)]
pub struct KvPage(Arc<Page>);

#[derive(Debug)]
struct Page {
    /// Taken out by `drop` alone.
    memory: Option<Buffer>,
    pool: Weak<Shared>,
}

impl KvPool {
    /// A pool of at most `most` pages for a model of this configuration; `usize::MAX`: as many as
    /// there is memory for. Memory is taken when it is needed.
    #[must_use]
    pub fn new(config: &ModelConfig, kind: KvType, most: usize) -> Self {
        let layout = KvLayout {
            kind,
            layers: config.num_hidden_layers(),
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
        };
        Self(Arc::new(Shared { layout, most, memory: Mutex::default() }))
    }

    /// Positions of a page.
    pub const POSITIONS: usize = PAGE;

    /// Bytes of a page of this model and kind.
    #[must_use]
    pub fn page_bytes(config: &ModelConfig, kind: KvType) -> usize {
        Self::new(config, kind, 0).0.layout.bytes()
    }

    /// Whole pages of this model and kind in so many bytes.
    #[must_use]
    pub fn pages_within(config: &ModelConfig, kind: KvType, bytes: u64) -> usize {
        let page = Self::page_bytes(config, kind).max(1) as u64;
        usize::try_from(bytes / page).unwrap_or(usize::MAX)
    }

    /// Most pages.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.0.most
    }

    /// Pages that nobody holds.
    #[must_use]
    pub fn free(&self) -> usize {
        self.0.most - self.memory().taken
    }

    /// Element type of its pages.
    #[must_use]
    pub fn kind(&self) -> KvType {
        self.0.layout.kind
    }

    pub(crate) fn layout(&self) -> KvLayout {
        self.0.layout
    }

    fn memory(&self) -> std::sync::MutexGuard<'_, Memory> {
        // What it guards is whole after every statement.
        self.0.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A page that nobody else holds, with whatever numbers; `tokens` is what it is for.
    pub(crate) fn take(&self, tokens: usize) -> Result<KvPage, Error> {
        let mut memory = self.memory();
        if memory.taken == self.0.most {
            return Err(Error::CacheFull { pages: self.0.most, positions: PAGE });
        }
        let buffer = match memory.free.pop() {
            Some(buffer) => buffer,
            None => Buffer::try_zeroed(self.0.layout.bytes())
                .map_err(|source| Error::Memory { tokens, source })?,
        };
        memory.taken += 1;
        Ok(KvPage(Arc::new(Page { memory: Some(buffer), pool: Arc::downgrade(&self.0) })))
    }

    /// A page of the same numbers that nobody else holds.
    pub(crate) fn copy(&self, page: &KvPage, tokens: usize) -> Result<KvPage, Error> {
        let mut copy = self.take(tokens)?;
        copy.lines_mut().expect("nobody else holds it").copy_from_slice(page.lines());
        Ok(copy)
    }
}

impl KvPage {
    /// Whether nobody else holds it.
    #[must_use]
    pub fn alone(&self) -> bool {
        // No weak references are ever made.
        Arc::strong_count(&self.0) == 1
    }

    pub(crate) fn lines(&self) -> &[Line] {
        self.0.memory.as_ref().expect("there until it is dropped")
    }

    /// `None` when somebody else holds it too.
    pub(crate) fn lines_mut(&mut self) -> Option<&mut [Line]> {
        Arc::get_mut(&mut self.0).map(|page| &mut **page.memory.as_mut().expect("there until it is dropped"))
    }

    /// Whether it is of this pool.
    pub(crate) fn is_of(&self, pool: &KvPool) -> bool {
        std::ptr::eq(self.0.pool.as_ptr(), Arc::as_ptr(&pool.0))
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        if let (Some(pool), Some(buffer)) = (self.pool.upgrade().map(KvPool), self.memory.take()) {
            let mut memory = pool.memory();
            memory.taken -= 1;
            memory.free.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(most: usize) -> KvPool {
        let json =
            br#"{"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
            "num_attention_heads": 2, "vocab_size": 10, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": true}"#;
        KvPool::new(&ModelConfig::parse(json, "config.json".as_ref()).unwrap(), KvType::I8, most)
    }

    #[test]
    fn a_pool_has_so_many_pages_and_uses_their_memory_again() {
        let pool = pool(3);
        let pages: Vec<KvPage> = (0..3).map(|_| pool.take(1).unwrap()).collect();
        assert_eq!(pool.free(), 0);
        let full = pool.take(1).unwrap_err().to_string();
        assert!(full.contains("3 pages of 64"), "{full}");
        let again = pages[1].clone();
        assert!(!again.alone() && pages[0].alone());
        drop(pages);
        assert_eq!(pool.free(), 2, "one is held still");
        let at = again.lines().as_ptr();
        drop(again);
        assert_eq!(pool.take(1).unwrap().lines().as_ptr(), at, "the last one freed");
        assert_eq!((pool.free(), pool.pages()), (3, 3));
    }

    #[test]
    fn a_page_is_written_by_who_holds_it_alone() {
        let pool = pool(usize::MAX);
        let mut page = pool.take(1).unwrap();
        page.lines_mut().unwrap()[0].0[5] = 7;
        let mut other = page.clone();
        assert!(page.lines_mut().is_none() && other.lines_mut().is_none());
        let mut copy = pool.copy(&page, 1).unwrap();
        copy.lines_mut().unwrap()[0].0[5] = 9;
        assert_eq!((page.lines()[0].0[5], copy.lines()[0].0[5]), (7, 9));
        drop(page);
        assert!(other.lines_mut().is_some());
        // A pool may end before its pages.
        drop(pool);
        drop(other);
    }
}
