//! What kernels run on: a GPU, or in tests the host shim.

use crate::{Address, Limits};
use bytemuck::Pod;
use std::fmt;
use std::marker::PhantomData;

/// A device refused or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// No driver library, or no device behind it.
    #[error("cuda: no NVIDIA driver or GPU found ({0})")]
    Missing(String),
    /// The driver is older than the embedded code.
    #[error(
        "cuda: the driver supports CUDA {got}, this program needs {want}: update the NVIDIA driver (580 or later)"
    )]
    OldDriver {
        /// What is needed.
        want: String,
        /// What is there.
        got: String,
    },
    /// The device is older than the kernels.
    #[error("cuda: {name} has compute capability {major}.{minor}, the kernels need 8.0 or later")]
    Architecture {
        /// Name of the device.
        name: String,
        /// Its compute capability.
        major: i32,
        /// Its compute capability.
        minor: i32,
    },
    /// Not enough memory.
    #[error("cuda: out of memory: {what} needs {bytes} bytes, {free} of {total} are free")]
    Memory {
        /// What was to be allocated.
        what: String,
        /// Its size.
        bytes: usize,
        /// Bytes free.
        free: usize,
        /// Bytes of the device.
        total: usize,
    },
    /// This program was built without device code.
    #[error(
        "cuda: this program holds no kernels ({0}): run `cargo xtask kernels` and build again with feature `cuda`"
    )]
    NoKernels(String),
    /// Anything else that a call of the driver reported.
    #[error("cuda: {call}: {message}")]
    Call {
        /// The call.
        call: String,
        /// What it reported.
        message: String,
    },
}

/// The oldest driver interface that loads the embedded code, as the driver counts: 1000 major + 10
/// minor.
#[cfg(any(feature = "cuda", test))]
pub(crate) const WANT_DRIVER: i32 = 13_000;

#[cfg(any(feature = "cuda", test))]
impl DeviceError {
    /// Refuses drivers that do not load the embedded code.
    pub(crate) fn old_driver(version: i32) -> Result<(), Self> {
        let words = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
        if version >= WANT_DRIVER {
            return Ok(());
        }
        Err(Self::OldDriver { want: words(WANT_DRIVER), got: words(version) })
    }

    /// Refuses devices that are older than the kernels.
    pub(crate) fn architecture(name: &str, (major, minor): (i32, i32)) -> Result<(), Self> {
        if major >= 8 {
            return Ok(());
        }
        Err(Self::Architecture { name: name.to_owned(), major, minor })
    }

    /// What a result of the driver other than success means. Codes are those of `cuda.h`.
    pub(crate) fn of_result(call: &str, code: u32, message: &str) -> Self {
        match code {
            // CUDA_ERROR_NO_DEVICE, SYSTEM_NOT_READY, STUB_LIBRARY: nothing behind the library.
            100 | 802 | 34 => Self::Missing(format!("{call}: {message}")),
            // UNSUPPORTED_PTX_VERSION, SYSTEM_DRIVER_MISMATCH: the driver is older than the code,
            // or than its own kernel module.
            222 | 803 => Self::OldDriver { want: "13.0".to_owned(), got: format!("too little: {message}") },
            // NO_BINARY_FOR_GPU, INVALID_PTX on a device that no embedded code fits.
            209 => Self::NoKernels(format!("{call}: none for this GPU: {message}")),
            _ => Self::Call { call: call.to_owned(), message: message.to_owned() },
        }
    }
}

/// A launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks along x and y.
    pub blocks: (u32, u32),
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

/// Memory and launches in one order (one stream).
///
/// Addresses in arguments are not checked here: kernels are launched by this workspace's code only,
/// which builds arguments from [`Buffer`]s and plans.
pub trait Device: fmt::Debug + Sync {
    /// Launches recorded to be repeated.
    type Graph: fmt::Debug + Send;
    /// What a block may use.
    fn limits(&self) -> Limits;
    /// Whether it has the kernels with products of warpgroups (`warpgroup.cuh`).
    fn warpgroups(&self) -> bool;
    /// Reserves `bytes`; `what` names them in a message.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    fn allocate(&self, bytes: usize, what: &str) -> Result<Address, DeviceError>;
    /// Frees what [`allocate`](Self::allocate) gave.
    fn free(&self, at: Address);
    /// Copies to the device.
    ///
    /// # Errors
    /// When the copy fails.
    fn write(&self, at: Address, bytes: &[u8]) -> Result<(), DeviceError>;
    /// Copies from the device, after everything launched before.
    ///
    /// # Errors
    /// When the copy, or a launch before it, failed.
    fn read(&self, at: Address, bytes: &mut [u8]) -> Result<(), DeviceError>;
    /// Copies on the device.
    ///
    /// # Errors
    /// When the copy fails.
    fn copy(&self, from: Address, to: Address, bytes: usize) -> Result<(), DeviceError> {
        let mut held = vec![0; bytes];
        self.read(from, &mut held)?;
        self.write(to, &held)
    }
    /// Starts a kernel.
    ///
    /// # Errors
    /// When there is no such kernel or the launch is refused.
    fn launch(&self, kernel: &str, grid: Grid, args: &[u8]) -> Result<(), DeviceError>;
    /// Records what `body` launches, without running it. `body` may be called more than once and
    /// should only launch.
    ///
    /// # Errors
    /// What `body` returns, or when it did more than launch.
    fn record(&self, body: &mut dyn FnMut() -> Result<(), DeviceError>) -> Result<Self::Graph, DeviceError>;
    /// Runs what was recorded.
    ///
    /// # Errors
    /// When a launch is refused.
    fn replay(&self, graph: &Self::Graph) -> Result<(), DeviceError>;
}

/// Memory on a device, freed with the value.
pub struct Buffer<'d, D: Device> {
    device: &'d D,
    at: Address,
    bytes: usize,
}

impl<D: Device> fmt::Debug for Buffer<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes at {:#x})", self.bytes, self.at)
    }
}

impl<D: Device> Drop for Buffer<'_, D> {
    fn drop(&mut self) {
        self.device.free(self.at);
    }
}

/// Rows of floats, from one of a buffer's on.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'b> {
    at: Address,
    bytes: usize,
    first: usize,
    of: PhantomData<&'b ()>,
}

impl<'b, D: Device> From<&'b Buffer<'_, D>> for Rows<'b> {
    fn from(buffer: &'b Buffer<'_, D>) -> Self {
        Self { at: buffer.at(), bytes: buffer.bytes(), first: 0, of: PhantomData }
    }
}

impl Rows<'_> {
    /// The address of `rows` rows of `cols` floats.
    ///
    /// # Panics
    /// When the buffer has fewer.
    #[must_use]
    pub fn floats(&self, rows: usize, cols: usize) -> Address {
        let (bytes, end) = (self.bytes, self.first + rows);
        assert!(bytes >= 4 * end * cols, "{end} rows of {cols} floats in a buffer of {bytes} bytes");
        self.at + 4 * (self.first * cols) as u64
    }
}

impl<'d, D: Device> Buffer<'d, D> {
    /// Its rows from `first` on.
    #[must_use]
    pub fn rows_from(&self, first: usize) -> Rows<'_> {
        Rows { first, ..Rows::from(self) }
    }

    /// `bytes` bytes of zeros.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    pub fn zeroed(device: &'d D, bytes: usize, what: &str) -> Result<Self, DeviceError> {
        let buffer = Self { at: device.allocate(bytes.max(16), what)?, bytes, device };
        device.write(buffer.at, &vec![0; bytes])?;
        Ok(buffer)
    }

    /// `bytes` bytes of anything, to be written by a kernel first.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    pub fn room(device: &'d D, bytes: usize, what: &str) -> Result<Self, DeviceError> {
        Ok(Self { at: device.allocate(bytes.max(16), what)?, bytes, device })
    }

    /// A copy of `values`.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    pub fn of<T: Pod>(device: &'d D, values: &[T], what: &str) -> Result<Self, DeviceError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let buffer = Self { at: device.allocate(bytes.len().max(16), what)?, bytes: bytes.len(), device };
        device.write(buffer.at, bytes)?;
        Ok(buffer)
    }

    /// A second buffer that holds the same.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    pub fn duplicate(&self) -> Result<Self, DeviceError> {
        let at = self.device.allocate(self.bytes.max(16), "a copy")?;
        let copy = Self { at, bytes: self.bytes, device: self.device };
        self.device.copy(self.at, copy.at, self.bytes)?;
        Ok(copy)
    }

    /// Whose memory it is.
    #[must_use]
    pub fn device(&self) -> &'d D {
        self.device
    }

    /// Where it is.
    #[must_use]
    pub fn at(&self) -> Address {
        self.at
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Overwrites the beginning.
    ///
    /// # Errors
    /// When the copy fails.
    ///
    /// # Panics
    /// When there are more values than fit.
    pub fn write<T: Pod>(&self, values: &[T]) -> Result<(), DeviceError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        assert!(bytes.len() <= self.bytes, "{} bytes into a buffer of {}", bytes.len(), self.bytes);
        self.device.write(self.at, bytes)
    }

    /// The first `n` values.
    ///
    /// # Errors
    /// When the copy fails.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn read<T: Pod>(&self, n: usize) -> Result<Vec<T>, DeviceError> {
        assert!(n * size_of::<T>() <= self.bytes, "{n} values of a buffer of {} bytes", self.bytes);
        let mut out = vec![T::zeroed(); n];
        self.device.read(self.at, bytemuck::cast_slice_mut(&mut out))?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_driver_reports_becomes_words_for_a_person() {
        assert_eq!(DeviceError::old_driver(13_000), Ok(()));
        let old = DeviceError::old_driver(12_040).unwrap_err().to_string();
        assert!(old.contains("CUDA 12.4") && old.contains("13.0") && old.contains("580"), "{old}");
        assert_eq!(DeviceError::architecture("H200", (9, 0)), Ok(()));
        let small = DeviceError::architecture("Tesla T4", (7, 5)).unwrap_err().to_string();
        assert!(small.contains("Tesla T4") && small.contains("7.5") && small.contains("8.0"), "{small}");
        for (code, part) in [
            (100, "no NVIDIA driver or GPU"),
            (34, "no NVIDIA driver or GPU"),
            (222, "update the NVIDIA driver"),
            (209, "none for this GPU"),
            (700, "cuLaunchKernel: an illegal address"),
        ] {
            let said = DeviceError::of_result("cuLaunchKernel", code, "an illegal address").to_string();
            assert!(said.contains(part), "{code}: {said}");
        }
    }

    #[test]
    fn a_lack_of_memory_names_its_size() {
        let (what, bytes, free, total) = ("KV cache".to_owned(), 5_000, 40, 100);
        let said = DeviceError::Memory { what, bytes, free, total }.to_string();
        assert_eq!(said, "cuda: out of memory: KV cache needs 5000 bytes, 40 of 100 are free");
    }
}
