//! The NVIDIA driver, loaded when it is asked for.
//!
//! One binary runs with and without a driver: `cudarc` opens the library at run time. Only the
//! driver's C interface is used, so that another crate could take its place in this file.
#![expect(unsafe_code, reason = "the driver is a C library")]

use crate::{Address, Buffer, Device, DeviceError, Grid, Limits};
use cudarc::driver::sys;
use std::{
    collections::{HashMap, HashSet},
    ffi::{CStr, c_void},
    fmt, ptr,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

mod embedded {
    include!(concat!(env!("OUT_DIR"), "/units.rs"));
}

/// The first GPU of the machine.
pub struct Gpu {
    name: String,
    capability: (i32, i32),
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    modules: Vec<sys::CUmodule>,
    functions: HashMap<String, usize>, // CUfunction
    /// Functions whose code is on the device, with all shared memory allowed.
    ready: Mutex<HashSet<usize>>,
    /// Whether it has the features of compute capability 9.0: kernels that wait themselves for what
    /// they depend on, and products of warpgroups.
    hopper: bool,
    /// Launches only look their functions up: the driver may not load code while it records.
    resolving: AtomicBool,
    limits: Limits,
}

/// Launches to be repeated as one.
pub struct Graph(sys::CUgraphExec);

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu").field("name", &self.name).field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Graph")
    }
}

// SAFETY: the driver's handles may be used from every thread whose current context is theirs;
// `enter` makes it so.
unsafe impl Send for Gpu {}
// SAFETY: as above; what this type changes itself is behind a mutex.
unsafe impl Sync for Gpu {}

// SAFETY: a handle that belongs to the context, not to a thread; the driver's calls take it on any.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `record`, destroyed once.
        let _ = unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}

fn check(call: &str, result: sys::CUresult) -> Result<(), DeviceError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = ptr::null();
    // SAFETY: the driver sets the pointer to a static text or to null.
    let known = unsafe { sys::cuGetErrorString(result, &raw mut text) } == sys::CUresult::CUDA_SUCCESS;
    let message = if known && !text.is_null() {
        // SAFETY: not null, and the driver's texts end with a zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        format!("error {}", result as u32)
    };
    Err(DeviceError::of_result(call, result as u32, &message))
}

impl Gpu {
    /// Opens the first GPU.
    ///
    /// # Errors
    /// [`DeviceError::Missing`], [`DeviceError::OldDriver`], [`DeviceError::Architecture`],
    /// [`DeviceError::NoKernels`].
    pub fn open() -> Result<Self, DeviceError> {
        // SAFETY: looks for the library and closes it again.
        if !unsafe { sys::is_culib_present() } {
            return Err(DeviceError::Missing("libcuda.so.1 could not be opened".to_owned()));
        }
        let missing = |e| match e {
            DeviceError::Call { call, message } => DeviceError::Missing(format!("{call}: {message}")),
            other => other,
        };
        // SAFETY: the first call of the driver, with the only flags there are.
        check("cuInit", unsafe { sys::cuInit(0) }).map_err(missing)?;
        let mut version = 0;
        // SAFETY: writes one integer.
        check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
        DeviceError::old_driver(version)?;
        let mut device = 0;
        // SAFETY: writes one device handle.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, 0) }).map_err(missing)?;
        let mut name = [0; 256];
        // SAFETY: the buffer has the length that is given.
        check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 256, device) })?;
        // SAFETY: the driver ends the name with a zero inside the buffer.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let attribute = |which| -> Result<i32, DeviceError> {
            let mut value = 0;
            // SAFETY: writes one integer.
            check("cuDeviceGetAttribute", unsafe {
                sys::cuDeviceGetAttribute(&raw mut value, which, device)
            })?;
            Ok(value)
        };
        use sys::CUdevice_attribute as A;
        let major = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        DeviceError::architecture(&name, (major, minor))?;
        if !embedded::MISSING.is_empty() {
            return Err(DeviceError::NoKernels(embedded::MISSING.to_owned()));
        }
        let size = |value: i32| usize::try_from(value).unwrap_or_default();
        let limits = Limits {
            multiprocessors: size(attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?),
            shared: size(attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?),
        };
        let mut context = ptr::null_mut();
        // SAFETY: writes one handle; released in `drop`.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&raw mut context, device)
        })?;
        // SAFETY: a context that was just retained.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) })?;
        let mut stream = ptr::null_mut();
        // SAFETY: writes one handle; destroyed in `drop`.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, 1) })?;
        let mut gpu = Self {
            name,
            capability: (major, minor),
            device,
            context,
            stream,
            modules: Vec::new(),
            functions: HashMap::new(),
            ready: Mutex::default(),
            hopper: (major, minor) == (9, 0),
            resolving: AtomicBool::new(false),
            limits,
        };
        for (unit, image) in embedded::UNITS {
            // The driver reads words.
            let mut aligned = vec![0u64; image.len().div_ceil(8)];
            bytemuck::cast_slice_mut(&mut aligned)[..image.len()].copy_from_slice(image);
            let mut module = ptr::null_mut();
            let image = aligned.as_ptr().cast::<c_void>();
            // SAFETY: a whole fat binary, which knows its own length; the driver copies what it
            // needs.
            check(&format!("loading kernels `{unit}`"), unsafe {
                sys::cuModuleLoadData(&raw mut module, image)
            })?;
            gpu.modules.push(module);
            gpu.enumerate(module)?;
        }
        Ok(gpu)
    }

    /// Notes the functions of a module by name.
    fn enumerate(&mut self, module: sys::CUmodule) -> Result<(), DeviceError> {
        let mut count = 0;
        // SAFETY: writes one integer.
        check("cuModuleGetFunctionCount", unsafe { sys::cuModuleGetFunctionCount(&raw mut count, module) })?;
        let mut functions = vec![ptr::null_mut(); count as usize];
        // SAFETY: the array has as many places as are given.
        check("cuModuleEnumerateFunctions", unsafe {
            sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module)
        })?;
        for function in functions {
            let mut name = ptr::null();
            // SAFETY: a function of a loaded module.
            check("cuFuncGetName", unsafe { sys::cuFuncGetName(&raw mut name, function) })?;
            // SAFETY: the driver's names end with a zero and live as long as the module.
            let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
            self.functions.insert(name, function as usize);
        }
        Ok(())
    }

    /// The device's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its compute capability, such as (9, 0).
    #[must_use]
    pub fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// Bytes a second of a copy inside its memory, read and written ones counted: the best of
    /// several, which take well below a second.
    ///
    /// # Errors
    /// [`DeviceError::Memory`] where not even a small copy finds room.
    pub fn copy_rate(&self) -> Result<f64, DeviceError> {
        const BYTES: usize = 1 << 30;
        let bytes = BYTES.min(self.memory().0 / 4) / 16 * 16;
        let (from, to) = (Buffer::room(self, bytes, "a copy")?, Buffer::room(self, bytes, "a copy")?);
        let mut best = 0f64;
        for _ in 0..5 {
            let ms = self.time(|| self.copy(from.at(), to.at(), bytes))?;
            best = best.max(2.0 * bytes as f64 / (f64::from(ms) / 1e3));
        }
        Ok(best)
    }

    /// Free and total bytes of memory.
    #[must_use]
    pub fn memory(&self) -> (usize, usize) {
        let (mut free, mut total) = (0, 0);
        if self.enter().is_err() {
            return (0, 0);
        }
        // SAFETY: writes two integers.
        let result = unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
        if check("cuMemGetInfo", result).is_ok() { (free, total) } else { (0, 0) }
    }

    /// Waits for everything launched.
    ///
    /// # Errors
    /// When a launch failed.
    pub fn wait(&self) -> Result<(), DeviceError> {
        self.enter()?;
        // SAFETY: this value's own stream.
        check("waiting for the GPU", unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    /// Milliseconds that the device spends on what `body` launches.
    ///
    /// # Errors
    /// What `body` returns, or when a launch failed.
    pub fn time(&self, body: impl FnOnce() -> Result<(), DeviceError>) -> Result<f32, DeviceError> {
        self.enter()?;
        let mut events = [ptr::null_mut(); 2];
        for event in &mut events {
            // SAFETY: writes one handle. Events are few and live as long as the program.
            check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut *event, 0) })?;
        }
        // SAFETY: a handle made above, this value's stream.
        check("cuEventRecord", unsafe { sys::cuEventRecord(events[0], self.stream) })?;
        body()?;
        // SAFETY: as above.
        check("cuEventRecord", unsafe { sys::cuEventRecord(events[1], self.stream) })?;
        self.wait()?;
        let mut ms = 0.0;
        // SAFETY: both events were recorded and have passed.
        check("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime_v2(&raw mut ms, events[0], events[1])
        })?;
        for event in events {
            // SAFETY: made above, destroyed once.
            check("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(event) })?;
        }
        Ok(ms)
    }

    /// Makes the device's context that of the calling thread.
    fn enter(&self) -> Result<(), DeviceError> {
        // SAFETY: retained by `open`, released in `drop`.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    fn function(&self, kernel: &str) -> Result<sys::CUfunction, DeviceError> {
        let known = self.functions.get(kernel);
        let &known = known.ok_or_else(|| DeviceError::NoKernels(format!("no kernel `{kernel}`")))?;
        let function = known as sys::CUfunction;
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        if ready.insert(known) {
            let most = i32::try_from(self.limits.shared).unwrap_or(i32::MAX);
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: a function of a loaded module.
            check("cuFuncLoad", unsafe { sys::cuFuncLoad(function) })?;
            // SAFETY: as above.
            check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(function, attribute, most) })?;
        }
        Ok(function)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // What fails here has nobody to tell.
        let _ = self.enter();
        for &module in &self.modules {
            // SAFETY: loaded by `open`, unloaded once.
            let _ = unsafe { sys::cuModuleUnload(module) };
        }
        // SAFETY: made by `open`, destroyed once.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        // SAFETY: retained by `open`.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl Device for Gpu {
    type Graph = Graph;

    fn limits(&self) -> Limits {
        self.limits
    }

    fn warpgroups(&self) -> bool {
        self.hopper
    }

    fn allocate(&self, bytes: usize, what: &str) -> Result<Address, DeviceError> {
        self.enter()?;
        let mut at = 0;
        // SAFETY: writes one address.
        let result = unsafe { sys::cuMemAlloc_v2(&raw mut at, bytes) };
        if result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (free, total) = self.memory();
            return Err(DeviceError::Memory { what: what.to_owned(), bytes, free, total });
        }
        check("cuMemAlloc", result)?;
        Ok(at)
    }

    fn free(&self, at: Address) {
        if self.enter().is_err() {
            return; // the driver is gone, and the memory with it
        }
        // SAFETY: an address that `allocate` gave, freed once by the buffer that owns it; the call
        // waits for launches that use it.
        let _ = unsafe { sys::cuMemFree_v2(at) };
    }

    fn write(&self, at: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        self.enter()?;
        let from = bytes.as_ptr().cast::<c_void>();
        // SAFETY: `Buffer` checked the length against the allocation; pageable memory is read
        // before the call returns.
        check("cuMemcpyHtoD", unsafe { sys::cuMemcpyHtoDAsync_v2(at, from, bytes.len(), self.stream) })?;
        self.wait()
    }

    fn read(&self, at: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.enter()?;
        let to = bytes.as_mut_ptr().cast::<c_void>();
        // SAFETY: `Buffer` checked the length against the allocation; the wait below ends the copy.
        check("cuMemcpyDtoH", unsafe { sys::cuMemcpyDtoHAsync_v2(to, at, bytes.len(), self.stream) })?;
        self.wait()
    }

    fn copy(&self, from: Address, to: Address, bytes: usize) -> Result<(), DeviceError> {
        self.enter()?;
        // SAFETY: `Buffer` owns both ranges.
        check("cuMemcpyDtoD", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream) })
    }

    fn launch(&self, kernel: &str, grid: Grid, args: &[u8]) -> Result<(), DeviceError> {
        self.enter()?;
        let function = self.function(kernel)?;
        if self.resolving.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut copy = vec![0u64; args.len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut copy)[..args.len()].copy_from_slice(args);
        let mut params = [copy.as_mut_ptr().cast::<c_void>()];
        // SAFETY: an attribute is plain numbers, zeros among them.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: grid.blocks.0,
            gridDimY: grid.blocks.1,
            gridDimZ: 1,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared,
            hStream: self.stream,
            attrs: &raw mut attribute,
            // A kernel may start while the one before it runs (`grid_wait` of `device.cuh`).
            numAttrs: u32::from(self.hopper),
        };
        // SAFETY: every kernel takes one structure, which the driver copies; this crate built it
        // for this kernel.
        let result = unsafe {
            sys::cuLaunchKernelEx(&raw const config, function, params.as_mut_ptr(), ptr::null_mut())
        };
        check(kernel, result)
    }

    fn record(&self, body: &mut dyn FnMut() -> Result<(), DeviceError>) -> Result<Graph, DeviceError> {
        self.enter()?;
        self.resolving.store(true, Ordering::Relaxed);
        let resolved = body();
        self.resolving.store(false, Ordering::Relaxed);
        resolved?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: this value's stream.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.stream, mode) })?;
        let outcome = body();
        let mut graph = ptr::null_mut();
        // SAFETY: ends the capture begun above, whatever became of the body.
        let ended =
            check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(self.stream, &raw mut graph) });
        outcome?;
        ended?;
        let mut exec = ptr::null_mut();
        // SAFETY: the graph made above.
        let made =
            check("cuGraphInstantiate", unsafe { sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) });
        // SAFETY: made above; what was instantiated lives on.
        let _ = unsafe { sys::cuGraphDestroy(graph) };
        made.map(|()| Graph(exec))
    }

    fn replay(&self, graph: &Graph) -> Result<(), DeviceError> {
        self.enter()?;
        // SAFETY: a graph of this value; its addresses live as long as the buffers of whoever
        // recorded it.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.0, self.stream) })
    }
}
