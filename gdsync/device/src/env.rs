//! Environment variables that change how the library behaves.

use std::sync::Once;

/// Those that the crates of this repository read, but for tests. docs/reference.md explains them.
const NAMES: &[&str] = &[
    "GDRCOPY_BACKEND",
    "GDRCOPY_ENABLE_LOGGING",
    "GDRCOPY_LOAD",
    "GDRCOPY_LOG_LEVEL",
    "GDRCOPY_STORE",
    "GDRCOPY_USE_DMABUF_MMAP",
    "GDSYNC_BY_REFERENCE",
    "GDSYNC_CAPI_WAIT_LIMIT",
    "GDSYNC_CMA",
    "GDSYNC_DEVICE",
    "GDSYNC_FAULTS",
    "GDSYNC_GID_INDEX",
    "GDSYNC_JOB_TOKEN",
    "GDSYNC_LIBFABRIC",
    "GDSYNC_LIBIBVERBS",
    "GDSYNC_LIBMLX5",
    "GDSYNC_PATH",
    "GDSYNC_PKEY_INDEX",
    "GDSYNC_PORT",
    "GDSYNC_RECORDER",
    "GDSYNC_RECORDER_DIR",
    "GDSYNC_SERVICE_LEVEL",
    "GDSYNC_STRICT",
    "GDSYNC_TRAFFIC_CLASS",
    "MP_BIND",
    "MP_ENABLE_DEBUG",
    "MP_GPU_PATH",
    "MP_LOCAL",
    "MP_NEAR",
    "MP_REG_CACHE",
    "MP_SPAWNED",
    "MP_USE_IB_HCA",
];

/// The value of a variable; an empty one counts as unset.
pub fn variable(name: &str) -> Option<String> {
    // Lossy, so that a value that is not UTF-8 is reported as wrong and not overlooked.
    let value = std::env::var_os(name)?.to_string_lossy().trim().to_owned();
    (!value.is_empty()).then_some(value)
}

/// Whether a variable is one of this library.
pub fn is_known(name: &str) -> bool {
    NAMES.contains(&name)
}

/// Whether a variable looks like one of this library and is none. Other programs, too, have variables that begin with `MP_`: of these
/// only names that are near one are meant.
pub fn is_misspelt(name: &str) -> bool {
    let is_of_tests = name.contains("_TEST_") || name.contains("_KMOD_");
    let is_ours = name.starts_with("GDSYNC_") || name.starts_with("GDRCOPY_");
    let is_near = || name.starts_with("MP_") && NAMES.iter().any(|known| differs_little(name, known));
    !is_known(name) && !is_of_tests && (is_ours || is_near())
}

/// Whether two names differ in two letters side by side at most.
fn differs_little(one: &str, other: &str) -> bool {
    let same = |pair: &(u8, u8)| pair.0 == pair.1;
    let start = one.bytes().zip(other.bytes()).take_while(same).count();
    let [one, other] = [&one.as_bytes()[start..], &other.as_bytes()[start..]];
    let end = one.iter().rev().zip(other.iter().rev()).take_while(|(a, b)| a == b).count();
    one.len().max(other.len()) - end <= 2
}

/// Names, once, in the log the variables of this process that are misspelt.
pub fn warn_of_misspelt() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if is_misspelt(&name) {
                tracing::warn!("{name} is no variable of this library: correct its name, or unset it");
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_found_and_variables_of_others_are_not() {
        let slips = "GDSYNC_DEVCE GDSYNC_PATHS GDRCOPY_BACKND MP_LOCL MP_LCOAL MP_REG_CASHE MP_BINDS";
        for name in slips.split(' ') {
            assert!(is_misspelt(name), "{name}");
        }
        let others = "MP_PROCS MP_EUILIB MP_ GDSYNC_TEST_DEVICE PATH OMP_BIND";
        for name in others.split(' ').chain(NAMES.iter().copied()) {
            assert!(!is_misspelt(name), "{name}");
        }
    }
}
