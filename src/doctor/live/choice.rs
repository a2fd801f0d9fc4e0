//! What this library opens when nobody says what, on the first GPU if there is one.

use gdsync::Device;
use gdsync::cuda::Gpu;
use serde::{Deserialize, Serialize};

use super::{Teller, turn};

/// What was opened. What is `None` was not come to.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(in crate::doctor) struct ChoiceFacts {
    /// The PCI address of the GPU whose streams would trigger, or why there is none.
    pub(in crate::doctor) gpu: Option<Result<String, String>>,
    /// The device that would be used, or why none.
    pub(in crate::doctor) device: Option<Result<String, String>>,
    /// Who reads the rings, or why the device does not open.
    pub(in crate::doctor) route: Option<Result<Route, String>>,
    /// How bytes travel.
    pub(in crate::doctor) wire: String,
    /// Why the card does not read the rings itself.
    pub(in crate::doctor) not_direct: Option<String>,
}

/// Who reads the rings.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(in crate::doctor) enum Route {
    Direct,
    Proxy,
    Soft,
}

pub(super) fn tell(teller: &Teller) {
    let mut facts = ChoiceFacts::default();
    teller.step("opening GPU 0");
    let _turn = turn::of_first();
    let gpu = Gpu::open(0);
    facts.gpu = Some(match &gpu {
        Ok(gpu) => Ok(gpu.pci_address().unwrap_or_default().to_owned()),
        Err(error) => Err(error.to_string()),
    });
    teller.facts(&facts);
    teller.step("looking for the nearest RDMA device");
    let device = match &gpu {
        Ok(gpu) => Device::near(gpu),
        Err(_) => Device::find(None),
    };
    facts.device = Some(match &device {
        Ok(device) => Ok(device.name().to_owned()),
        Err(error) => Err(error.to_string()),
    });
    teller.facts(&facts);
    let Ok(device) = device else { return };
    teller.step(format!("opening {}", device.name()));
    match device.open() {
        Ok(context) => {
            facts.route = Some(Ok(match context.not_direct() {
                _ if context.is_software() => Route::Soft,
                Some(_) => Route::Proxy,
                None => Route::Direct,
            }));
            facts.wire = context.wire().to_owned();
            facts.not_direct = context.not_direct().map(str::to_owned);
            teller.facts(&facts);
        }
        Err(error) => {
            facts.route = Some(Err(error.to_string()));
            teller.facts(&facts);
        }
    }
}
