//! The table of the cases. Names that GDRCopy has mean the same here.

use super::case::{Case, Env, Group, Outcome, Run, fail, waive};
use super::{arguments, basic, data, descriptors, exhaustion, forks, invalidation, leaks};
use super::super::tools_shared::AllocFn;

const fn case(name: &'static str, run: Run, what: &'static str) -> Case {
    Case { name, what, group: Group::Standard, alloc: AllocFn::CuMemAlloc, repeats: false, run }
}

const fn vmm(name: &'static str, run: Run) -> Case {
    Case { alloc: AllocFn::CuMemCreate, ..case(name, run, "the same with cuMemCreate") }
}

const fn repeats(case: Case) -> Case {
    Case { repeats: true, ..case }
}

const fn extended(case: Case) -> Case {
    Case { group: Group::Extended, ..case }
}

const fn tool(case: Case) -> Case {
    Case { group: Group::Tool, ..case }
}

/// All cases.
pub(super) const CASES: &[Case] = &[
    case("basic_cumemalloc", basic::basic, "pin and unpin"),
    vmm("basic_vmmalloc", basic::basic),
    case("basic_v2_cumemalloc", basic::basic, "pin and unpin with flags, none of them set"),
    vmm("basic_v2_vmmalloc", basic::basic),
    case("basic_v2_forcepci_cumemalloc", basic::force_pcie, "pin through PCIe"),
    vmm("basic_v2_forcepci_vmmalloc", basic::force_pcie),
    case("basic_with_tokens", basic::tokens, "pin with P2P tokens"),
    case(
        "basic_unaligned_mapping",
        basic::unaligned_mapping,
        "unaligned addresses work; a freed neighbour does no harm",
    ),
    case("basic_small_buffers_mapping", basic::small_buffers, "two pins of 8 bytes in one page"),
    case("basic_two_buffers_one_page", basic::two_buffers_one_page, "two allocations in one page, one freed"),
    case(
        "basic_child_thread_pins_buffer_cumemalloc",
        basic::child_thread,
        "pin, unpin, close in several threads",
    ),
    vmm("basic_child_thread_pins_buffer_vmmalloc", basic::child_thread),
    case("basic_second_mapping", basic::second_mapping, "one mapping of a pin, several pins of a buffer"),
    case("basic_unpin_while_mapped", basic::unpin_while_mapped, "a mapping keeps its pin"),
    repeats(case("basic_concurrent_mappings", basic::concurrent, "threads map own and shared buffers")),
    case("attributes_sanity", basic::attributes, "the properties of the backend"),
    case("arguments_null", arguments::null, "address 0 is refused"),
    case("arguments_size_zero", arguments::size_zero, "0 bytes are refused"),
    case("arguments_beyond_allocation", arguments::beyond_allocation, "more than was allocated is refused"),
    case("arguments_host_pointer", arguments::host_pointer, "host memory is refused"),
    case("arguments_managed_memory", arguments::managed_memory, "managed memory is refused"),
    case("arguments_freed_memory", arguments::freed_memory, "freed memory is refused"),
    case("arguments_no_such_gpu", arguments::no_such_gpu, "GPUs that do not exist are refused"),
    case("arguments_other_gpu", arguments::other_gpu, "memory of another GPU than the current one"),
    case("arguments_out_of_bounds", arguments::out_of_bounds, "accesses outside a mapping are refused"),
    repeats(case("data_validation_cumemalloc", data::validation, "all bytes, both ways, many offsets")),
    repeats(vmm("data_validation_vmmalloc", data::validation)),
    repeats(case(
        "data_validation_v2_cumemalloc",
        data::validation,
        "the same, pinned with flags, none of them set",
    )),
    repeats(case(
        "data_validation_v2_forcepci_cumemalloc",
        data::validation_force_pcie,
        "the same through PCIe",
    )),
    case("data_validation_mix_mappings_cumemalloc", data::mix_mappings, "write-combining beside cached"),
    case("data_unaligned_pins", data::unaligned_pins, "pins of any start and length, exact to the byte"),
    case("data_words", data::words, "words of 1 to 8 bytes arrive whole"),
    case(
        "invalidation_access_after_gdr_close_cumemalloc",
        invalidation::access_after_close,
        "unmapped is unmapped",
    ),
    vmm("invalidation_access_after_gdr_close_vmmalloc", invalidation::access_after_close),
    case(
        "invalidation_access_after_free_cumemalloc",
        invalidation::access_after_free,
        "freed memory stays while mapped",
    ),
    vmm("invalidation_access_after_free_vmmalloc", invalidation::access_after_free),
    case(
        "invalidation_two_mappings_cumemalloc",
        invalidation::two_mappings,
        "freeing one buffer spares another",
    ),
    vmm("invalidation_two_mappings_vmmalloc", invalidation::two_mappings),
    case("invalidation_partial_unmap", invalidation::partial_unmap, "a part is unmapped from outside"),
    case("invalidation_free_under_copy", invalidation::free_under_copy, "freed while another thread copies"),
    case(
        "invalidation_fork_access_after_free_cumemalloc",
        forks::access_after_free,
        "a stale mapping shows nothing new",
    ),
    vmm("invalidation_fork_access_after_free_vmmalloc", forks::access_after_free),
    case("invalidation_fork_after_gdr_map_cumemalloc", forks::after_map, "a forked child has a hole"),
    vmm("invalidation_fork_after_gdr_map_vmmalloc", forks::after_map),
    case(
        "invalidation_fork_child_gdr_map_parent_cumemalloc",
        forks::child_maps_parents_pin,
        "a child uses nothing of its parent",
    ),
    vmm("invalidation_fork_child_gdr_map_parent_vmmalloc", forks::child_maps_parents_pin),
    case(
        "invalidation_fork_map_and_free_cumemalloc",
        forks::map_and_free,
        "a child's freeing spares its parent",
    ),
    vmm("invalidation_fork_map_and_free_vmmalloc", forks::map_and_free),
    case("invalidation_fork_child_gdr_pin_parent_with_tokens", forks::tokens, "a parent's P2P tokens"),
    case(
        "fork_child_pins_parents_address",
        forks::child_pins_parents_address,
        "an address of another process is refused",
    ),
    case("fork_child_drops", forks::child_drops, "a child's drops spare its parent"),
    case(
        "invalidation_unix_sock_shared_fd_gdr_pin_buffer_cumemalloc",
        descriptors::pin_by_shared,
        "a passed descriptor cannot pin",
    ),
    vmm("invalidation_unix_sock_shared_fd_gdr_pin_buffer_vmmalloc", descriptors::pin_by_shared),
    case(
        "invalidation_unix_sock_shared_fd_gdr_map_cumemalloc",
        descriptors::map_by_shared,
        "a passed descriptor cannot map",
    ),
    vmm("invalidation_unix_sock_shared_fd_gdr_map_vmmalloc", descriptors::map_by_shared),
    case("bar1_exhaustion", exhaustion::bar1, "BAR1 full: a typed error, and room again afterwards"),
    repeats(case("leak_check", leaks::leak_check, "cycles of all calls leave nothing behind")),
    repeats(case("stress", leaks::stress, "the same in many threads at a time")),
    extended(case(
        "leakage_pin_pages_fork_cumemalloc",
        descriptors::leak_over_fork,
        "an old module leaks or panics here",
    )),
    tool(case("tool_passes", |_| Ok(()), "passes")),
    tool(case("tool_fails", |_| fail("as it shall"), "fails")),
    tool(case("tool_waives", |_| waive("as it shall"), "is waived")),
    tool(case("tool_crashes", crash, "is killed by a signal")),
    tool(case("tool_hangs", hang, "does not end, and neither does its child")),
];

fn crash(_: &Env) -> Outcome {
    std::process::abort()
}

fn hang(_: &Env) -> Outcome {
    super::fork::fork(|_| hang_for_ever())?;
    hang_for_ever()
}

fn hang_for_ever() -> Outcome {
    loop {
        std::thread::park();
    }
}
