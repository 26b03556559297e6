//! Hidden states of a text on their way through a model, in a scratch file between blocks: of each
//! sequence its numbers and their digest.

use fracbit_io::{keep, kept, output::write_error};
use fracbit_load::{Error, Progress};
use fracbit_model::{Block, State, StateOptions, WeightSource};
use std::{
    fs::File,
    io::{self, BufReader, BufWriter, Read, Write},
    path::{Path, PathBuf},
};

/// Token sequences, each run from an empty state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sequences(Vec<Vec<u32>>);

impl Sequences {
    /// Takes sequences; empty ones are left out.
    #[must_use]
    pub fn new(sequences: Vec<Vec<u32>>) -> Self {
        Self(sequences.into_iter().filter(|s| !s.is_empty()).collect())
    }

    /// Cuts a row of tokens; `None` when the lengths do not add up.
    pub(crate) fn cut(tokens: &[u32], lengths: &[u32]) -> Option<Self> {
        let mut rest = tokens;
        let mut out = Vec::with_capacity(lengths.len());
        for &length in lengths {
            let (sequence, after) = rest.split_at_checked(length as usize)?;
            out.push(sequence.to_vec());
            rest = after;
        }
        rest.is_empty().then(|| Self::new(out))
    }

    /// Sequences.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True when there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Tokens of all sequences.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.0.iter().map(Vec::len).sum()
    }

    /// The sequences.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &[u32]> + ExactSizeIterator {
        self.0.iter().map(Vec::as_slice)
    }

    /// A state of a block that each of them fits.
    pub(crate) fn state(&self, block: &Block) -> State {
        let longest = self.iter().map(<[u32]>::len).max().unwrap_or(0);
        let options =
            StateOptions { context: Some(longest), chunk: 512, bf16: true, ..StateOptions::default() };
        block.state(&options)
    }

    pub(crate) fn all(&self) -> Vec<u32> {
        self.0.concat()
    }

    pub(crate) fn lengths(&self) -> Vec<u32> {
        self.iter().map(|s| u32::try_from(s.len()).expect("a context fits 32 bits")).collect()
    }

    /// Keeps sequences for a continued run: a count, the lengths, the tokens.
    pub(crate) fn save(&self, path: &Path) -> Result<(), Error> {
        let count = u32::try_from(self.len()).expect("a text has fewer than 2^32 sequences");
        let words = [vec![count], self.lengths(), self.all()].concat();
        let bytes: Vec<u8> = words.iter().flat_map(|v| v.to_le_bytes()).collect();
        Ok(keep(path, &bytes).map_err(|e| write_error(e, "writing", path, bytes.len() as u64))?)
    }

    /// What [`Sequences::save`] kept; `None` when there is nothing whole.
    pub(crate) fn read(path: &Path) -> Option<Self> {
        let bytes = kept(path)?;
        let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let (&count, rest) = words.split_first()?;
        let (lengths, tokens) = rest.split_at_checked(count as usize)?;
        Self::cut(tokens, lengths)
    }
}

/// Bytes of a digest.
const SUM: usize = blake3::OUT_LEN;

/// The hidden states that enter block `at`.
pub(crate) struct Stream<'a> {
    sequences: &'a Sequences,
    width: usize,
    dir: PathBuf,
    name: &'static str,
    at: usize,
}

impl<'a> Stream<'a> {
    /// The stream before block `at`, in files under `dir`: at 0 what [`Stream::begin`] writes,
    /// later what [`Stream::through`] left there. Streams of other names do not meet.
    pub(crate) fn new(
        source: &WeightSource,
        sequences: &'a Sequences,
        dir: &Path,
        name: &'static str,
        at: usize,
    ) -> Self {
        Self { sequences, width: source.config().hidden_size, dir: dir.to_owned(), name, at }
    }

    /// Writes the hidden states that enter the first block.
    pub(crate) fn begin(
        &self,
        mut embed: impl FnMut(&[u32]) -> Result<Vec<f32>, Error>,
    ) -> Result<(), Error> {
        let mut out = Writer::create(self.file(0), self.bytes())?;
        for tokens in self.sequences.iter() {
            out.write(&embed(tokens)?)?;
        }
        out.finish()
    }

    fn file(&self, at: usize) -> PathBuf {
        self.dir.join(format!("{}-{at}", self.name))
    }

    /// Whether the hidden states before block `at` are there, as they were written.
    pub(crate) fn is_kept(&self) -> bool {
        let size = std::fs::metadata(self.file(self.at)).map(|file| file.len());
        size.is_ok_and(|size| size == self.bytes()) && self.each(|_| Ok(())).is_ok()
    }

    /// Bytes of the hidden states before one block.
    pub(crate) fn bytes(&self) -> u64 {
        (4 * self.sequences.tokens() * self.width + SUM * self.sequences.len()) as u64
    }

    /// Runs every sequence through `block`, which must be block `at`, and writes what leaves it
    /// beside what entered it; `after` hears how many sequences are through.
    pub(crate) fn through(
        &mut self,
        block: &Block,
        progress: &dyn Progress,
        mut after: impl FnMut(usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut state = self.state(block);
        let mut out = self.behind()?;
        let mut done = 0;
        self.each(|x| {
            state.reset();
            block.forward(&mut state, x)?;
            progress.advance((x.len() / self.width) as u64);
            out.write(x)?;
            done += 1;
            after(done)
        })?;
        out.finish()
    }

    /// Takes the hidden states behind the block.
    pub(crate) fn behind(&self) -> Result<Writer, Error> {
        Writer::create(self.file(self.at + 1), self.bytes())
    }

    /// Goes on to the next block; the hidden states that entered this one are removed.
    pub(crate) fn advance(&mut self) -> Result<(), Error> {
        let old = self.file(self.at);
        self.at += 1;
        match std::fs::remove_file(&old) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(fracbit_io::Error::Io { op: "removing", path: old, source }.into())
            }
            _ => Ok(()),
        }
    }

    /// A state that every sequence fits.
    pub(crate) fn state(&self, block: &Block) -> State {
        self.sequences.state(block)
    }

    /// Gives the hidden states of one sequence after the other, (tokens, hidden).
    pub(crate) fn each(&self, mut f: impl FnMut(&mut [f32]) -> Result<(), Error>) -> Result<(), Error> {
        let mut reader = self.reader()?;
        for _ in self.sequences.iter() {
            f(&mut reader.next()?)?;
        }
        Ok(())
    }

    /// [`Stream::each`] of two streams at the same block.
    pub(crate) fn beside(
        &self,
        other: &Self,
        mut f: impl FnMut(&mut [f32], &mut [f32]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (mut reader, mut others) = (self.reader()?, other.reader()?);
        for _ in self.sequences.iter() {
            f(&mut reader.next()?, &mut others.next()?)?;
        }
        Ok(())
    }

    fn reader(&self) -> Result<Reader<'_>, Error> {
        let path = self.file(self.at);
        let file = File::open(&path).map_err(|source| fracbit_io::Error::Io {
            op: "opening",
            path: path.clone(),
            source,
        })?;
        let lengths = self.sequences.0.iter();
        Ok(Reader { file: BufReader::with_capacity(1 << 20, file), path, lengths, width: self.width })
    }
}

/// A scratch file being read, a sequence at a time.
struct Reader<'a> {
    file: BufReader<File>,
    path: PathBuf,
    lengths: std::slice::Iter<'a, Vec<u32>>,
    width: usize,
}

impl Reader<'_> {
    fn next(&mut self) -> Result<Vec<f32>, Error> {
        let tokens = self.lengths.next().map_or(0, Vec::len);
        let mut bytes = vec![0; 4 * tokens * self.width + SUM];
        let read = self.file.read_exact(&mut bytes);
        read.map_err(|source| fracbit_io::Error::Io { op: "reading", path: self.path.clone(), source })?;
        let sum = bytes.split_off(bytes.len() - SUM);
        if blake3::hash(&bytes).as_bytes()[..] != sum {
            let rule = "should hold what was written to it, it was changed or damaged: delete the directory \
                        and start over"
                .to_owned();
            return Err(fracbit_io::Error::Output { path: self.path.clone(), rule }.into());
        }
        Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }
}

/// A scratch file being written.
pub(crate) struct Writer {
    file: BufWriter<File>,
    path: PathBuf,
    left: u64,
}

impl Writer {
    fn create(path: PathBuf, bytes: u64) -> Result<Self, Error> {
        match File::create(&path) {
            Ok(file) => Ok(Self { file: BufWriter::with_capacity(1 << 20, file), path, left: bytes }),
            Err(e) => Err(write_error(e, "creating", &path, bytes).into()),
        }
    }

    /// Writes the numbers of the next sequence.
    pub(crate) fn write(&mut self, values: &[f32]) -> Result<(), Error> {
        let mut bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        bytes.extend_from_slice(blake3::hash(&bytes).as_bytes());
        self.file.write_all(&bytes).map_err(|e| write_error(e, "writing", &self.path, self.left))?;
        self.left = self.left.saturating_sub(bytes.len() as u64);
        Ok(())
    }

    pub(crate) fn finish(mut self) -> Result<(), Error> {
        let synced = self.file.flush().and_then(|()| self.file.get_ref().sync_all());
        Ok(synced.map_err(|e| write_error(e, "syncing", &self.path, self.left))?)
    }
}
