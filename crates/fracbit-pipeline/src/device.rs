//! Rounding on a GPU; generic over the device, so that it is tested without one.

use fracbit_codebook::Rounder;
use fracbit_kernels_cuda::{Device, TrellisEncoder};
use fracbit_quant::{Effort, Rounders};

/// Rounders that search the codes of trellis schemes on `device`, exactly and with the bytes of the
/// processor. A scheme that the device cannot take stays with the processor.
pub fn rounders_on<D: Device + Send + Sync + 'static>(device: &'static D) -> Rounders {
    let provider = move |scheme| {
        let rounder = fracbit_trellis::rounder(scheme, Effort::Exact)?;
        match TrellisEncoder::new(device, rounder) {
            Ok(encoder) => Some(Box::new(encoder) as Box<dyn Rounder>),
            Err(_) => None,
        }
    };
    Rounders::provided(Box::new(provider))
}
