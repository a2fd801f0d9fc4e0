//! Each way to map GPU memory, tried by itself.

use gdrcopy::{BackendKind, Gdr};
use serde::{Deserialize, Serialize};

use super::{Teller, turn};

/// What became of each way; those that were not come to are missing.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(in crate::doctor) struct MappingFacts {
    pub(in crate::doctor) backends: Vec<Backend>,
}

/// One way.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(in crate::doctor) struct Backend {
    pub(in crate::doctor) name: String,
    /// What a trial showed, or why it does not serve.
    pub(in crate::doctor) outcome: Result<String, String>,
}

pub(super) fn tell(teller: &Teller) {
    let mut facts = MappingFacts::default();
    teller.step("cuInit");
    let _turn = turn::of_first();
    for kind in BackendKind::ALL.into_iter().filter(|kind| *kind != BackendKind::Host) {
        teller.step(format!("mapping GPU memory by {kind}"));
        let outcome = attempt(kind);
        facts.backends.push(Backend { name: kind.name().to_owned(), outcome });
        teller.facts(&facts);
    }
}

/// Maps memory of the first GPU, and reads back what was written.
fn attempt(kind: BackendKind) -> Result<String, String> {
    const VALUE: u64 = 0x6764_6173_796e_6321;
    let open = || {
        let gdr = Gdr::builder().backend(kind).open()?;
        let mapping = gdr.alloc(0, 64 << 10)?.map()?;
        mapping.store(0, VALUE)?;
        mapping.flush()?;
        Ok((mapping.load::<u64>(0)?, gdr.driver_version()))
    };
    let (read, version) = open().map_err(|error: gdrcopy::Error| match error {
        gdrcopy::Error::NoBackend(refusals) => {
            refusals.iter().map(|refusal| refusal.error.to_string()).collect::<Vec<_>>().join("; ")
        }
        other => other.to_string(),
    })?;
    if read != VALUE {
        return Err(format!("{VALUE:#x} was written through a mapping, and {read:#x} read"));
    }
    let version = version.map(|(major, minor)| format!(", module {major}.{minor}"));
    Ok(format!("64 KiB of GPU 0 mapped, written and read back{}", version.unwrap_or_default()))
}
