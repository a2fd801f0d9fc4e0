//! The dynamic symbols and the name of the library.

use std::collections::BTreeSet;

/// The parts of a 64-bit ELF file that a dynamic linker looks at (System V ABI, chapters 4 and 5).
struct Elf(Vec<u8>);

const SHT_DYNAMIC: u32 = 6;
const SHT_DYNSYM: u32 = 11;
const DT_NULL: u64 = 0;
const DT_SONAME: u64 = 14;

impl Elf {
    fn number(&self, at: usize, bytes: usize) -> u64 {
        let mut word = [0; 8];
        word[..bytes].copy_from_slice(&self.0[at..at + bytes]);
        u64::from_le_bytes(word)
    }

    fn size(&self, at: usize, bytes: usize) -> usize {
        usize::try_from(self.number(at, bytes)).unwrap()
    }

    fn text(&self, at: usize) -> &str {
        let end = at + self.0[at..].iter().position(|&byte| byte == 0).unwrap();
        std::str::from_utf8(&self.0[at..end]).unwrap()
    }

    /// Where the section header of this number is.
    fn header(&self, section: usize) -> usize {
        self.size(0x28, 8) + section * self.size(0x3a, 2)
    }

    /// The entries of the one section of a type, and where its strings are.
    fn section(&self, wanted: u32) -> (impl Iterator<Item = usize>, usize) {
        let header = (0..self.size(0x3c, 2))
            .map(|section| self.header(section))
            .find(|header| self.number(header + 4, 4) == wanted.into())
            .unwrap();
        let (start, size) = (self.size(header + 0x18, 8), self.size(header + 0x20, 8));
        let strings = self.header(self.size(header + 0x28, 4));
        ((start..start + size).step_by(self.size(header + 0x38, 8)), self.size(strings + 0x18, 8))
    }
}

#[test]
fn only_the_functions_of_the_header_are_exported() {
    let elf = Elf(std::fs::read(crate::common::library()).unwrap());
    assert_eq!(&elf.0[..6], b"\x7fELF\x02\x01", "64-bit, little endian");

    let (symbols, strings) = elf.section(SHT_DYNSYM);
    let exported: BTreeSet<&str> = symbols
        .filter(|at| elf.number(at + 6, 2) != 0)
        .map(|at| elf.text(strings + elf.size(at, 4)))
        .collect();
    let functions = [
        "gdr_close",
        "gdr_copy_from_mapping",
        "gdr_copy_to_mapping",
        "gdr_driver_get_version",
        "gdr_get_attribute",
        "gdr_get_callback_flag",
        "gdr_get_info",
        "gdr_get_info_v2",
        "gdr_get_mapping_type_string",
        "gdr_map",
        "gdr_map_v2",
        "gdr_open",
        "gdr_pin_buffer",
        "gdr_pin_buffer_v2",
        "gdr_runtime_get_version",
        "gdr_unmap",
        "gdr_unpin_buffer",
        "gdrx_alloc",
        "gdrx_backend",
        "gdrx_copy_in",
        "gdrx_copy_out",
        "gdrx_describe",
        "gdrx_free",
    ];
    assert_eq!(exported, BTreeSet::from(functions));

    // All of them are in the header, `gdr_get_info` in the macro.
    let header = std::fs::read_to_string(crate::common::package("include/gdrapi.h")).unwrap();
    for function in functions.into_iter().filter(|&name| name != "gdr_get_info") {
        assert!(header.contains(&format!("{function}(")), "{function}");
    }

    let (entries, strings) = elf.section(SHT_DYNAMIC);
    let soname = entries
        .map(|at| (elf.number(at, 8), elf.size(at + 8, 8)))
        .take_while(|&(tag, _)| tag != DT_NULL)
        .find_map(|(tag, value)| (tag == DT_SONAME).then(|| elf.text(strings + value)));
    assert_eq!(soname, Some("libgdrapi.so.2"));
}
