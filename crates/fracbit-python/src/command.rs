//! Commands as functions, and the program itself.

use crate::{
    errors::{Refused, argument, raise},
    work,
};
use fracbit::{Dealt, Error, Job, Worker};
use fracbit_cli::Cluster;
use pyo3::{
    prelude::*,
    types::{PyAny, PyBytes},
};
use std::{
    ffi::OsString,
    sync::{Arc, Mutex, PoisonError},
};

/// Run one command, such as `["inspect", "--json", "small"]`, and return what it would print.
///
/// `progress` is None, True or a function. `cluster` makes of an address what deals the work of
/// `--ray`. Errors are exceptions with the text of the command.
#[pyfunction]
#[pyo3(signature = (args, progress=None, cluster=None))]
pub(crate) fn command(
    py: Python<'_>,
    args: Vec<OsString>,
    progress: Option<&Bound<'_, PyAny>>,
    cluster: Option<Py<PyAny>>,
) -> PyResult<String> {
    let cluster = cluster.map(dealing);
    work::run(py, progress, |listener| fracbit_cli::call_with(args, listener, cluster))
}

/// Run the program with the arguments of a process, its name first; return the exit code.
#[pyfunction]
#[pyo3(signature = (args, cluster=None))]
pub(crate) fn main(py: Python<'_>, args: Vec<OsString>, cluster: Option<Py<PyAny>>) -> u8 {
    let cluster = cluster.map(dealing);
    py.detach(|| fracbit_cli::main_with(args, cluster) as u8)
}

/// A function of Python as a cluster.
fn dealing(made_by: Py<PyAny>) -> Cluster {
    let made_by = Arc::new(made_by);
    Arc::new(move |address| {
        let (address, made_by) = (address.to_owned(), Arc::clone(&made_by));
        Arc::new(Dealer { address, made_by, dealer: Mutex::default() })
    })
}

/// What deals parts in Python: `begin(job, first, count, stride)`, `take(index)`, `end()`.
#[derive(Debug)]
struct Dealer {
    address: String,
    made_by: Arc<Py<PyAny>>,
    dealer: Mutex<Option<Py<PyAny>>>,
}

impl Dealer {
    /// Calls Python, whose exceptions are refusals with their text.
    fn call<T>(&self, f: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> Result<T, Error> {
        let mut dealer = self.dealer.lock().unwrap_or_else(PoisonError::into_inner);
        let called = Python::attach(|py| {
            if dealer.is_none() {
                *dealer = Some(self.made_by.call1(py, (&self.address,))?);
            }
            f(dealer.as_ref().expect("just made").bind(py))
        });
        called.map_err(|error| {
            let rule = Python::attach(|py| error.value(py).to_string());
            Error::Dealt { rule }
        })
    }
}

impl Dealt for Dealer {
    fn begin(&self, job: &Job, first: usize, count: usize) -> Result<(), Error> {
        self.call(|dealer| {
            dealer.call_method1("begin", (job.to_json(), first, count, job.stride())).map(drop)
        })
    }

    fn take(&self, index: usize) -> Result<Vec<u8>, Error> {
        self.call(|dealer| {
            let bytes = dealer.call_method1("take", (index,))?;
            Ok(bytes.cast::<PyBytes>()?.as_bytes().to_vec())
        })
    }
}

impl Drop for Dealer {
    fn drop(&mut self) {
        let dealer = self.dealer.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(dealer) = dealer {
            // What goes wrong here changes nothing that was written.
            Python::attach(|py| drop(dealer.call_method0(py, "end")));
        }
    }
}

/// The worker of the last job, and its text.
static WORKER: Mutex<Option<(String, Arc<Worker>)>> = Mutex::new(None);

fn worker(job: String) -> Refused<Arc<Worker>> {
    let mut kept = WORKER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((of, worker)) = kept.as_ref()
        && *of == job
    {
        return Ok(Arc::clone(worker));
    }
    *kept = None; // first, so that one model is open at a time
    let parsed = Job::from_json(&job).map_err(|error| argument("job", error))?;
    let worker = Arc::new(Worker::new(&parsed)?);
    *kept = Some((job, Arc::clone(&worker)));
    Ok(worker)
}

/// Make one part of a job that `--ray` deals, and what the part one stride behind it goes on from,
/// which it is given as `before`; the worker is kept for the next.
#[pyfunction]
#[pyo3(signature = (job, index, before=None))]
pub(crate) fn make_part<'py>(
    py: Python<'py>,
    job: String,
    index: usize,
    before: Option<&[u8]>,
) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
    let before = before.unwrap_or_default();
    let made = py.detach(|| -> Refused<_> { Ok(worker(job)?.make(index, before)?) });
    let (part, behind) = made.map_err(|refusal| raise(py, &refusal))?;
    Ok((PyBytes::new(py, &part), PyBytes::new(py, &behind)))
}
