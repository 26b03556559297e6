//! Pages of the cache: where states take them from, and how they share them.
//!
//! A state holds a list of pages of [`POSITIONS`] positions, each with keys and values of all
//! layers (`crate::kv`). States with the same beginning may hold the same pages: what is written
//! goes to a copy, so at most one page of a state is not whole, and none is ever written that
//! another holds (copy on write). Pages come from a [`PagePool`], which has at most so many; memory
//! of pages that nobody holds any more is used again. Where that memory is, [`PageMemory`] knows.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use fracbit_io::ModelConfig;
use fracbit_kernels::{Buffer, Line};

use crate::Error;
use crate::kv::{KvLayout, KvType, PAGE};

/// Positions of a page.
pub const POSITIONS: usize = PAGE;

/// Where the keys and values of pages are.
pub trait PageMemory: Debug + Send + Sync {
    /// Those of one page.
    type Room: Debug + Send + Sync;

    /// Room for one more page, with whatever numbers; `tokens` is what it is for.
    ///
    /// # Errors
    /// [`Error::Memory`] or [`Error::Device`].
    fn room(&self, tokens: usize) -> Result<Self::Room, Error>;

    /// Copies all numbers of a page.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn copy(&self, from: &Self::Room, to: &mut Self::Room) -> Result<(), Error>;
}

/// Pages for the states of a model; clones are the same pool.
#[derive(Debug)]
pub struct PagePool<M: PageMemory>(Arc<Shared<M>>);

impl<M: PageMemory> Clone for PagePool<M> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

#[derive(Debug)]
struct Shared<M: PageMemory> {
    memory: M,
    most: usize,
    rooms: Mutex<Rooms<M::Room>>,
}

#[derive(Debug)]
struct Rooms<R> {
    /// Of pages that nobody holds.
    free: Vec<R>,
    taken: usize,
}

/// Keys and values of [`POSITIONS`] positions in all layers, shared by whoever holds it.
#[derive(Debug)]
pub struct Page<M: PageMemory>(Arc<Held<M>>);

impl<M: PageMemory> Clone for Page<M> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

#[derive(Debug)]
struct Held<M: PageMemory> {
    /// Taken out by `drop` alone.
    room: Option<M::Room>,
    pool: Weak<Shared<M>>,
}

impl<M: PageMemory> PagePool<M> {
    /// A pool of at most `most` pages; `usize::MAX`: as many as there is memory for.
    #[must_use]
    pub fn of(memory: M, most: usize) -> Self {
        let rooms = Mutex::new(Rooms { free: Vec::new(), taken: 0 });
        Self(Arc::new(Shared { memory, most, rooms }))
    }

    /// Most pages.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.0.most
    }

    /// Pages that nobody holds.
    #[must_use]
    pub fn free(&self) -> usize {
        self.0.most - self.rooms().taken
    }

    /// Whether another is a clone of it.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Where its pages are.
    #[must_use]
    pub fn memory(&self) -> &M {
        &self.0.memory
    }

    fn rooms(&self) -> std::sync::MutexGuard<'_, Rooms<M::Room>> {
        // What it guards is whole after every statement.
        self.0.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A page that nobody else holds, with whatever numbers; `tokens` is what it is for.
    fn take(&self, tokens: usize) -> Result<Page<M>, Error> {
        let mut rooms = self.rooms();
        if rooms.taken == self.0.most {
            return Err(Error::CacheFull { pages: self.0.most, positions: PAGE });
        }
        let room = match rooms.free.pop() {
            Some(room) => room,
            None => self.0.memory.room(tokens)?,
        };
        rooms.taken += 1;
        Ok(Page(Arc::new(Held { room: Some(room), pool: Arc::downgrade(&self.0) })))
    }

    /// A page of the same numbers that nobody else holds.
    fn copy(&self, page: &Page<M>, tokens: usize) -> Result<Page<M>, Error> {
        let mut copy = self.take(tokens)?;
        self.0.memory.copy(page.room(), copy.room_mut().expect("nobody else holds it"))?;
        Ok(copy)
    }
}

impl<M: PageMemory> Page<M> {
    /// Whether nobody else holds it.
    #[must_use]
    pub fn alone(&self) -> bool {
        // No weak references are ever made.
        Arc::strong_count(&self.0) == 1
    }

    /// Where its numbers are.
    ///
    /// # Panics
    /// Never.
    #[must_use]
    pub fn room(&self) -> &M::Room {
        self.0.room.as_ref().expect("there until it is dropped")
    }

    /// `None` when somebody else holds it too.
    fn room_mut(&mut self) -> Option<&mut M::Room> {
        Arc::get_mut(&mut self.0).map(|held| held.room.as_mut().expect("there until it is dropped"))
    }

    /// Whether it is of this pool.
    fn is_of(&self, pool: &PagePool<M>) -> bool {
        std::ptr::eq(self.0.pool.as_ptr(), Arc::as_ptr(&pool.0))
    }
}

impl<M: PageMemory> Drop for Held<M> {
    fn drop(&mut self) {
        if let (Some(pool), Some(room)) = (self.pool.upgrade().map(PagePool), self.room.take()) {
            let mut rooms = pool.rooms();
            rooms.taken -= 1;
            rooms.free.push(room);
        }
    }
}

/// The pages of one sequence, and how many of its tokens they hold.
#[derive(Debug)]
pub struct PageList<M: PageMemory> {
    pool: PagePool<M>,
    pages: Vec<Page<M>>,
    capacity: usize,
    len: usize,
}

impl<M: PageMemory> PageList<M> {
    /// No pages, for at most `capacity` tokens.
    #[must_use]
    pub fn new(pool: PagePool<M>, capacity: usize) -> Self {
        Self { pool, pages: Vec::new(), capacity, len: 0 }
    }

    /// Takes pages for `tokens` more, up to the capacity. Pages that are to be written and that
    /// others hold too are given up for copies.
    ///
    /// # Errors
    /// [`Error::CacheFull`], or what the memory says; it then holds the tokens that it held, and
    /// keeps the pages that it got.
    pub fn reserve(&mut self, tokens: usize) -> Result<(), Error> {
        if tokens == 0 {
            return Ok(());
        }
        let want = self.len.saturating_add(tokens).min(self.capacity);
        let (first, end) = (self.len / PAGE, want.div_ceil(PAGE));
        for at in first..end {
            match self.pages.get(at) {
                Some(page) if page.alone() => {}
                // What it holds of the sequence's tokens is copied.
                Some(page) if at == first && !self.len.is_multiple_of(PAGE) => {
                    self.pages[at] = self.pool.copy(page, want)?;
                }
                Some(_) => self.pages[at] = self.pool.take(want)?,
                None => self.pages.push(self.pool.take(want)?),
            }
        }
        Ok(())
    }

    /// Pages that [`reserve`](Self::reserve) would take from the pool.
    #[must_use]
    pub fn wanted(&self, tokens: usize) -> usize {
        let want = self.len.saturating_add(tokens).min(self.capacity);
        let pages = if tokens == 0 { 0..0 } else { self.len / PAGE..want.div_ceil(PAGE) };
        pages.filter(|&at| !self.pages.get(at).is_some_and(Page::alone)).count()
    }

    /// The pages of the tokens that it holds; the last one may not be whole.
    #[must_use]
    pub fn pages(&self) -> &[Page<M>] {
        &self.pages[..self.len.div_ceil(PAGE)]
    }

    /// Those, and pages that are there for tokens to come.
    #[must_use]
    pub fn reserved(&self) -> &[Page<M>] {
        &self.pages
    }

    /// Makes it hold the first `len` tokens of another list's [`pages`](Self::pages) in place of
    /// its own: the two share them until one writes to them.
    ///
    /// # Errors
    /// [`Error::Pages`] when they are of another pool or are not those of `len` tokens, or when
    /// these do not fit.
    pub fn share(&mut self, pages: &[Page<M>], len: usize) -> Result<(), Error> {
        let ours = pages.iter().all(|page| page.is_of(&self.pool));
        if !ours || pages.len() != len.div_ceil(PAGE) || len > self.capacity {
            return Err(Error::Pages { pages: pages.len(), len, capacity: self.capacity });
        }
        self.pages.clear();
        self.pages.extend_from_slice(pages);
        self.len = len;
        Ok(())
    }

    /// Where its pages are from.
    #[must_use]
    pub fn pool(&self) -> &PagePool<M> {
        &self.pool
    }

    /// Tokens held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when no token is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Most tokens it can hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets all tokens but the first `len`; does nothing when there are no more.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Holds so many more, which were written to reserved pages.
    pub fn advance(&mut self, tokens: usize) {
        self.len += tokens;
    }
}

/// Pages in main memory.
#[derive(Debug)]
pub struct HostMemory(KvLayout);

impl PageMemory for HostMemory {
    type Room = Buffer;

    fn room(&self, tokens: usize) -> Result<Buffer, Error> {
        Buffer::try_kept(self.0.bytes()).map_err(|source| Error::Memory { tokens, source })
    }

    fn copy(&self, from: &Buffer, to: &mut Buffer) -> Result<(), Error> {
        to.copy_from_slice(from);
        Ok(())
    }
}

/// A pool in main memory.
pub type KvPool = PagePool<HostMemory>;
/// One of its pages.
pub type KvPage = Page<HostMemory>;

impl KvPool {
    /// A pool of at most `most` pages for a model of this configuration; `usize::MAX`: as many as
    /// there is memory for. Memory is taken when it is needed.
    #[must_use]
    pub fn new(config: &ModelConfig, kind: KvType, most: usize) -> Self {
        Self::of(HostMemory(KvLayout::of(config, kind)), most)
    }

    /// Bytes of a page of this model and kind.
    #[must_use]
    pub fn page_bytes(config: &ModelConfig, kind: KvType) -> usize {
        KvLayout::of(config, kind).bytes()
    }

    /// Whole pages of this model and kind in so many bytes.
    #[must_use]
    pub fn pages_within(config: &ModelConfig, kind: KvType, bytes: u64) -> usize {
        let page = Self::page_bytes(config, kind).max(1) as u64;
        usize::try_from(bytes / page).unwrap_or(usize::MAX)
    }

    /// Element type of its pages.
    #[must_use]
    pub fn kind(&self) -> KvType {
        self.layout().kind
    }

    pub(crate) fn layout(&self) -> KvLayout {
        self.memory().0
    }
}

impl KvPage {
    pub(crate) fn lines(&self) -> &[Line] {
        self.room()
    }
}

impl PageList<HostMemory> {
    /// The lines of a page that is held alone; `None` of one that others hold too.
    pub(crate) fn lines_mut(&mut self, at: usize) -> Option<&mut [Line]> {
        self.pages[at].room_mut().map(|room| &mut **room)
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
        page.room_mut().unwrap()[0].0[5] = 7;
        let mut other = page.clone();
        assert!(page.room_mut().is_none() && other.room_mut().is_none());
        let mut copy = pool.copy(&page, 1).unwrap();
        copy.room_mut().unwrap()[0].0[5] = 9;
        assert_eq!((page.lines()[0].0[5], copy.lines()[0].0[5]), (7, 9));
        drop(page);
        assert!(other.room_mut().is_some());
        // A pool may end before its pages.
        drop(pool);
        drop(other);
    }
}
