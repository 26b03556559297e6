//! Bytes at 64-byte alignment, on huge pages where there are many.

use memmap2::{MmapMut, MmapOptions};
use std::{
    collections::TryReserveError,
    fmt,
    marker::PhantomData,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    slice,
    sync::{Arc, Mutex, PoisonError},
};

/// One cache line.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub struct Line(pub [u8; 64]);

impl Line {
    /// All zero.
    pub const ZERO: Self = Self([0; 64]);
}

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;
/// Bytes of a chunk that small buffers share.
const CHUNK: usize = 4 * HUGE;

/// Cache lines that stay where they are: the home of codes, caches and work space.
///
/// From 2 MiB on they lie on huge pages (2 MiB) as far as the system grants them: one thread then
/// reads its stream at the full bandwidth, where with 4 KiB pages the hardware prefetcher stops at
/// the end of each, and each has to be found by its address (see `docs/lab/2026-11-speed.md`).
/// Smaller ones that are [kept](Self::kept) share such pages.
pub struct Buffer(Home);

enum Home {
    Heap(Vec<Line>),
    /// Lines `start..start + len` of a mapping.
    Mapped {
        map: MmapMut,
        start: usize,
        len: usize,
    },
    Shared(Shared),
}

impl Buffer {
    /// `len` bytes, zeroed and rounded up to whole lines.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        let len = len.div_ceil(64);
        Self(Home::mapped(len).unwrap_or_else(|| Home::Heap(vec![Line::ZERO; len])))
    }

    /// The same for what lives as long as a model: small ones lie side by side on huge pages, which
    /// go back to the system when none of them is left.
    #[must_use]
    pub fn kept(len: usize) -> Self {
        match len.div_ceil(64) {
            0 => Self::zeroed(0),
            lines if lines * 64 < HUGE => {
                Shared::of(lines).map_or_else(|| Self::zeroed(len), |s| Self(Home::Shared(s)))
            }
            _ => Self::zeroed(len),
        }
    }

    /// As [`zeroed`](Self::zeroed).
    ///
    /// # Errors
    /// When the system gives too little memory.
    pub fn try_zeroed(len: usize) -> Result<Self, TryReserveError> {
        let len = len.div_ceil(64);
        if let Some(home) = Home::mapped(len) {
            return Ok(Self(home));
        }
        let mut lines = Vec::new();
        lines.try_reserve_exact(len)?;
        lines.resize(len, Line::ZERO);
        Ok(Self(Home::Heap(lines)))
    }

    /// As [`kept`](Self::kept).
    ///
    /// # Errors
    /// When the system gives too little memory.
    pub fn try_kept(len: usize) -> Result<Self, TryReserveError> {
        match len.div_ceil(64) {
            lines if lines > 0 && lines < HUGE / 64 => match Shared::of(lines) {
                Some(shared) => Ok(Self(Home::Shared(shared))),
                None => Self::try_zeroed(len),
            },
            _ => Self::try_zeroed(len),
        }
    }

    /// The same memory as numbers.
    #[must_use]
    pub fn numbers(&self) -> &[u64] {
        bytemuck::cast_slice(self)
    }

    /// The same memory as numbers, to be written.
    #[must_use]
    pub fn numbers_mut(&mut self) -> &mut [u64] {
        bytemuck::cast_slice_mut(self)
    }
}

impl Home {
    /// A mapping of `len` lines that starts with a huge page; `None` for small ones and where the
    /// system refuses.
    fn mapped(len: usize) -> Option<Self> {
        let bytes = len.checked_mul(64).filter(|&b| b >= HUGE)?;
        let (map, start) = huge(bytes)?;
        Some(Self::Mapped { map, start: start / 64, len })
    }
}

/// A mapping, and where in it `bytes` start with a huge page.
fn huge(bytes: usize) -> Option<(MmapMut, usize)> {
    let map = MmapOptions::new().len(bytes.checked_add(HUGE)?).map_anon().ok()?;
    let start = map.as_ptr().align_offset(HUGE);
    #[cfg(target_os = "linux")]
    // Whole huge pages only: the rest would be rounded up. A refusal costs speed, nothing else.
    let _ = map.advise_range(memmap2::Advice::HugePage, start, bytes / HUGE * HUGE);
    Some((map, start))
}

/// Lines of a chunk that nobody else has.
struct Shared {
    /// Keeps the memory.
    _chunk: Arc<MmapMut>,
    first: NonNull<Line>,
    len: usize,
}

/// The chunk that is being dealt out.
struct Chunk {
    map: Arc<MmapMut>,
    /// The first line on a huge page, behind which [`CHUNK`] bytes are the map's.
    first: NonNull<Line>,
    /// Lines that were dealt out.
    used: usize,
}

#[expect(unsafe_code, reason = "pieces of one mapping")]
// SAFETY: the lines are plain memory that the mapping keeps, and nothing but this piece has them.
unsafe impl Send for Shared {}
#[expect(unsafe_code, reason = "pieces of one mapping")]
// SAFETY: as above; they change by `&mut` alone.
unsafe impl Sync for Shared {}
#[expect(unsafe_code, reason = "pieces of one mapping")]
// SAFETY: it only says where memory is that the mapping keeps.
unsafe impl Send for Chunk {}

impl Chunk {
    fn new() -> Option<Self> {
        let (mut map, start) = huge(CHUNK)?;
        let first = NonNull::from(&mut map[start..start + CHUNK]).cast();
        Some(Self { map: Arc::new(map), first, used: 0 })
    }
}

impl Shared {
    /// So many lines, fewer than those of a huge page, zeroed; `None` where the system refuses.
    fn of(len: usize) -> Option<Self> {
        static CURRENT: Mutex<Option<Chunk>> = Mutex::new(None);
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(chunk) = &mut *current
            && Arc::get_mut(&mut chunk.map).is_some()
        {
            chunk.used = 0; // no piece of it is left
        }
        if current.as_ref().is_none_or(|chunk| (chunk.used + len) * 64 > CHUNK) {
            *current = Some(Chunk::new()?);
        }
        let chunk = current.as_mut()?;
        #[expect(unsafe_code, reason = "pieces of one mapping")]
        // SAFETY: `used` and `len` lines are the chunk's, by the check above.
        let first = unsafe { chunk.first.add(chunk.used) };
        chunk.used += len;
        let mut shared = Self { _chunk: Arc::clone(&chunk.map), first, len };
        drop(current); // clearing takes time, and nobody else has these lines
        shared.get_mut().fill(Line::ZERO);
        Some(shared)
    }

    fn get(&self) -> &[Line] {
        #[expect(unsafe_code, reason = "pieces of one mapping")]
        // SAFETY: `of` dealt these lines to this piece alone, the mapping is kept, and every byte
        // of it has a value.
        unsafe {
            slice::from_raw_parts(self.first.as_ptr(), self.len)
        }
    }

    fn get_mut(&mut self) -> &mut [Line] {
        #[expect(unsafe_code, reason = "pieces of one mapping")]
        // SAFETY: as for `get`.
        unsafe {
            slice::from_raw_parts_mut(self.first.as_ptr(), self.len)
        }
    }
}

impl Deref for Buffer {
    type Target = [Line];

    fn deref(&self) -> &[Line] {
        match &self.0 {
            Home::Heap(lines) => lines,
            Home::Mapped { map, start, len } => {
                &bytemuck::cast_slice::<u8, Line>(&map[..64 * (start + len)])[*start..]
            }
            Home::Shared(shared) => shared.get(),
        }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [Line] {
        match &mut self.0 {
            Home::Heap(lines) => lines,
            Home::Mapped { map, start, len } => {
                &mut bytemuck::cast_slice_mut::<u8, Line>(&mut map[..64 * (*start + *len)])[*start..]
            }
            Home::Shared(shared) => shared.get_mut(),
        }
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Self {
        let new = if matches!(self.0, Home::Shared(_)) { Self::kept } else { Self::zeroed };
        let mut copy = new(64 * self.len());
        copy.copy_from_slice(self);
        copy
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("lines", &self.len()).finish_non_exhaustive()
    }
}

/// Numbers in a [`Buffer`]: caches of keys and values, and work space.
#[derive(Clone)]
pub struct Numbers<T> {
    home: Buffer,
    len: usize,
    kind: PhantomData<T>,
}

impl<T: bytemuck::Pod> Numbers<T> {
    /// `len` zeros.
    ///
    /// # Errors
    /// When the system gives too little memory.
    pub fn try_zeroed(len: usize) -> Result<Self, TryReserveError> {
        // Saturation turns an overflow into a refusal: no allocation of that size succeeds.
        Ok(Self { home: Buffer::try_zeroed(len.saturating_mul(size_of::<T>()))?, len, kind: PhantomData })
    }

    /// Makes it `len` numbers of work space: zeros in new memory, else whatever stood there before.
    pub fn renew(&mut self, len: usize) {
        let bytes = len * size_of::<T>();
        if self.home.len() * 64 < bytes {
            self.home = Buffer::zeroed(bytes);
        }
        self.len = len;
    }

    /// Forgets all but the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}

impl<T> Default for Numbers<T> {
    fn default() -> Self {
        Self { home: Buffer(Home::Heap(Vec::new())), len: 0, kind: PhantomData }
    }
}

impl<T: bytemuck::Pod> Deref for Numbers<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &bytemuck::cast_slice(&self.home)[..self.len]
    }
}

impl<T: bytemuck::Pod> DerefMut for Numbers<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut bytemuck::cast_slice_mut(&mut self.home)[..self.len]
    }
}

impl<T> fmt::Debug for Numbers<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Numbers").field("len", &self.len).finish_non_exhaustive()
    }
}

/// The lines as bytes.
pub(crate) fn bytes(lines: &[Line]) -> &[u8] {
    bytemuck::cast_slice(lines)
}

/// The lines as bytes, to be written.
pub(crate) fn bytes_mut(lines: &mut [Line]) -> &mut [u8] {
    bytemuck::cast_slice_mut(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_every_home_are_zeroed_aligned_and_their_own() {
        for len in [0, 1, 64, 65, HUGE - 1, HUGE, HUGE + 1, 3 * HUGE - 64] {
            let mut a = Buffer::zeroed(len);
            assert_eq!(a.len(), len.div_ceil(64), "{len}");
            assert!(a.iter().all(|l| l.0 == [0; 64]), "{len}");
            assert!(a.as_ptr().is_aligned(), "{len}");
            assert_eq!(matches!(a.0, Home::Mapped { .. }), a.len() * 64 >= HUGE, "{len}");
            a.iter_mut().for_each(|l| l.0[7] = 3);
            let b = a.clone();
            a.iter_mut().for_each(|l| l.0[7] = 4);
            assert!(b.iter().all(|l| l.0[7] == 3) && b.len() == a.len(), "{len}");
        }
    }

    #[test]
    fn kept_buffers_are_zeroed_aligned_and_their_own_wherever_they_lie() {
        // More than a chunk of them, some let go on the way, from several threads.
        std::thread::scope(|scope| {
            for thread in 0..3u8 {
                scope.spawn(move || {
                    let mut held: Vec<(Buffer, u8)> = Vec::new();
                    for i in 0..60u8 {
                        let len = [0, 1, 64, 70_000, 300_000, HUGE - 64, HUGE][usize::from(i % 7)];
                        let mut new = Buffer::kept(len);
                        assert_eq!(new.len(), len.div_ceil(64), "{len}");
                        assert!(new.iter().all(|line| line.0 == [0; 64]), "{len}");
                        assert!(new.as_ptr().is_aligned(), "{len}");
                        let mark = 3 * i + thread + 1;
                        new.iter_mut().for_each(|line| line.0 = [mark; 64]);
                        held.push((new.clone(), mark));
                        if i % 3 == 0 {
                            held.swap_remove(usize::from(i) / 5);
                        }
                        assert!(held.iter().all(|(b, mark)| b.iter().all(|line| line.0 == [*mark; 64])));
                    }
                });
            }
        });
    }

    #[test]
    fn numbers_start_with_a_line_and_too_many_are_refused() {
        let mut numbers = Numbers::<f32>::default();
        assert!(numbers.is_empty());
        for len in [3, 100, HUGE] {
            numbers.renew(len);
            assert!(numbers.len() == len && numbers.iter().all(|&n| n == 0.0), "{len}");
            assert!(numbers.as_ptr().addr().is_multiple_of(64), "{len}");
        }
        numbers[1] = 7.0;
        numbers.truncate(2);
        numbers.truncate(5);
        assert_eq!(*numbers, [0.0, 7.0]);
        assert_eq!(Numbers::<u16>::try_zeroed(5).expect("ten bytes")[..], [0; 5]);
        assert!(Numbers::<u64>::try_zeroed(usize::MAX / 4).is_err());
    }
}
