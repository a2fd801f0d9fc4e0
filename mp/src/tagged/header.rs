//! What goes before the payload of a message, and alone where there is none.

use gdsync::memory::Memory;

/// What a rank tells another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing but credits.
    Credits,
    /// A message; its payload is behind the header.
    Eager { tag: u64 },
    /// A message; its payload stays where it is until it is cleared.
    Announced { tag: u64, id: u64, bytes: u32 },
    /// The payload of an announced message can be sent.
    Cleared { id: u64 },
    /// It need not: an announced message is done with.
    Done { id: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    /// Eager messages that the receiver has room for again.
    pub(super) credits: u16,
}

impl Header {
    pub(super) const BYTES: usize = 24;

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let (kind, tag, id, len) = match self.kind {
            Kind::Credits => (0, 0, 0, 0),
            Kind::Eager { tag } => (1, tag, 0, 0),
            Kind::Announced { tag, id, bytes } => (2, tag, id, bytes),
            Kind::Cleared { id } => (3, 0, id, 0),
            Kind::Done { id } => (4, 0, id, 0),
        };
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&tag.to_le_bytes());
        bytes[8..16].copy_from_slice(&id.to_le_bytes());
        bytes[16..20].copy_from_slice(&len.to_le_bytes());
        bytes[20..22].copy_from_slice(&self.credits.to_le_bytes());
        bytes[22] = kind;
        bytes
    }

    fn from_bytes(from: &[u8; Self::BYTES]) -> Option<Self> {
        let (tag, rest) = from.split_first_chunk()?;
        let (id, rest) = rest.split_first_chunk()?;
        let (bytes, rest) = rest.split_first_chunk()?;
        let (credits, rest) = rest.split_first_chunk()?;
        let (tag, id, bytes) =
            (u64::from_le_bytes(*tag), u64::from_le_bytes(*id), u32::from_le_bytes(*bytes));
        let kind = match rest {
            [0, _] => Kind::Credits,
            [1, _] => Kind::Eager { tag },
            [2, _] => Kind::Announced { tag, id, bytes },
            [3, _] => Kind::Cleared { id },
            [4, _] => Kind::Done { id },
            _ => return None,
        };
        Some(Self { kind, credits: u16::from_le_bytes(*credits) })
    }

    pub(super) fn write(self, memory: &Memory, at: usize) -> gdsync::Result<()> {
        memory.write(at, &self.to_bytes())
    }

    /// `None` for bytes that no header has.
    pub(super) fn read(memory: &Memory, at: usize) -> gdsync::Result<Option<Self>> {
        let mut bytes = [0; Self::BYTES];
        memory.read(at, &mut bytes)?;
        Ok(Self::from_bytes(&bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_as_they_were_written() {
        let memory = Memory::alloc(64).unwrap();
        let (tag, id, bytes) = (u64::MAX - 1, 1 << 40, u32::MAX - 2);
        let kinds = [
            Kind::Credits,
            Kind::Eager { tag },
            Kind::Announced { tag, id, bytes },
            Kind::Cleared { id },
            Kind::Done { id },
        ];
        for (credits, kind) in (7..).zip(kinds) {
            let header = Header { kind, credits };
            header.write(&memory, 8).unwrap();
            assert_eq!(Header::read(&memory, 8).unwrap(), Some(header));
        }
        memory.write(8 + 22, &[9]).unwrap();
        assert_eq!(Header::read(&memory, 8).unwrap(), None, "there is no such kind");
    }
}
