//! Files, clients, objects and mappings of the simulated resource manager.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;

use super::Live;
use crate::backend::rm::abi;
use crate::backend::rm::status::NvStatus;
use crate::standin::vma::Vma;
use crate::standin::{DeviceEnd, FileId, Object};

pub(super) type Outcome = Result<(), NvStatus>;

/// Everything that is open or allocated.
#[derive(Debug, Default)]
pub(super) struct Tables {
    files: HashMap<FileId, OpenFile>,
    clients: BTreeMap<u32, Client>,
    mappings: Vec<Mapping>,
    made: u32,
    pub(super) violations: Vec<String>,
}

#[derive(Debug)]
struct OpenFile {
    end: DeviceEnd,
    /// None for the control device.
    gpu: Option<i32>,
    /// The control file with which this file of a GPU is registered.
    control: Option<FileId>,
}

#[derive(Debug)]
pub(super) struct Client {
    file: FileId,
    made: u32,
    pub(super) objects: BTreeMap<u32, Entry>,
}

#[derive(Debug)]
pub(super) struct Entry {
    parent: u32,
    pub(super) kind: Kind,
}

#[derive(Debug)]
pub(super) enum Kind {
    Device { gpu: i32 },
    Subdevice,
    ConfidentialCompute,
    Memory(Arc<Object>),
}

/// A mapping in BAR1, and the file whose `mmap` shows it.
#[derive(Debug)]
pub(super) struct Mapping {
    client: u32,
    memory: u32,
    linear: u64,
    file: FileId,
    pub(super) object: Arc<Object>,
    pub(super) offset: usize,
    pub(super) len: usize,
    pub(super) vma: Option<Vma>,
}

/// Clients count from behind CUDA's.
const FIRST_CLIENT: u32 = crate::standin::CLIENT + 1;
/// `RS_UNIQUE_HANDLE_BASE` in `rs_client.h`.
const FIRST_HANDLE: u32 = 0xcaf0_0000;
/// Bus address of a BAR1.
const BAR1: u64 = 0x38_0000_0000;

impl Tables {
    /// Notices closed files, then counts.
    pub(super) fn live(&mut self) -> Live {
        self.reap();
        Live {
            files: self.files.len(),
            clients: self.clients.len(),
            objects: self.clients.values().map(|client| client.objects.len()).sum(),
            mappings: self.mappings.len(),
        }
    }

    /// Takes away what closed files held.
    fn reap(&mut self) {
        self.files.retain(|_, file| !file.end.is_closed());
        let (files, violations) = (&self.files, &mut self.violations);
        self.clients.retain(|handle, client| {
            let open = files.contains_key(&client.file);
            if !open {
                violations.push(format!("client {handle:#x} was left to the closing of its file"));
            }
            open
        });
        let clients = &self.clients;
        self.mappings.retain(|mapping| clients.contains_key(&mapping.client));
    }

    pub(super) fn add_file(&mut self, end: DeviceEnd, gpu: Option<i32>) {
        self.reap();
        self.files.insert(end.id(), OpenFile { end, gpu, control: None });
    }

    pub(super) fn register(&mut self, file: FileId, control: FileId) -> io::Result<()> {
        let is_control = self.files.get(&control).is_some_and(|file| file.gpu.is_none());
        match self.files.get_mut(&file) {
            Some(file) if is_control && file.control.is_none() => {
                file.control = Some(control);
                Ok(())
            }
            _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        }
    }

    /// Whether a file of the GPU is registered with the control file.
    pub(super) fn is_registered(&mut self, control: FileId, gpu: i32) -> bool {
        self.reap();
        self.files.values().any(|file| file.gpu == Some(gpu) && file.control == Some(control))
    }

    pub(super) fn add_client(&mut self, file: FileId) -> u32 {
        let handle = FIRST_CLIENT + self.made;
        self.made += 1;
        self.clients.insert(handle, Client { file, made: 0, objects: BTreeMap::new() });
        handle
    }

    /// A client, for the file that made it.
    pub(super) fn client(&mut self, file: FileId, handle: u32) -> Result<&mut Client, NvStatus> {
        self.clients.get_mut(&handle).filter(|client| client.file == file).ok_or(NvStatus::INVALID_CLIENT)
    }

    pub(super) fn free(&mut self, file: FileId, call: &abi::Free) -> Outcome {
        let client = self.client(file, call.root)?;
        let violations = if call.object == call.root {
            let left = client.objects.len();
            self.clients.remove(&call.root);
            (left > 0).then(|| format!("client {:#x} freed with {left} objects", call.root))
        } else {
            let object = client.objects.get(&call.object).ok_or(NvStatus::INVALID_OBJECT_HANDLE)?;
            if object.parent != call.parent {
                return Err(NvStatus::INVALID_OBJECT_PARENT);
            }
            client.objects.remove(&call.object);
            let children = client.objects.values().filter(|child| child.parent == call.object).count();
            let mapped =
                self.mappings.iter().filter(|m| (m.client, m.memory) == (call.root, call.object)).count();
            (children + mapped > 0).then(|| {
                format!("object {:#x} freed with {children} children, {mapped} mappings", call.object)
            })
        };
        self.violations.extend(violations);
        Ok(())
    }

    pub(super) fn map(&mut self, file: FileId, target: FileId, call: &mut abi::Map, bar1: u64) -> Outcome {
        self.reap();
        let client = self.client(file, call.client)?;
        let Some(&Entry { kind: Kind::Device { gpu }, .. }) = client.objects.get(&call.device) else {
            return Err(NvStatus::INVALID_OBJECT_PARENT);
        };
        let object = match client.objects.get(&call.memory) {
            Some(Entry { kind: Kind::Memory(object), .. }) => object.clone(),
            _ => return Err(NvStatus::INVALID_OBJECT_HANDLE),
        };
        let (offset, len) = (call.offset, call.length);
        if offset >= object.size as u64 {
            return Err(NvStatus::INVALID_BASE);
        }
        if len == 0 || len > object.size as u64 - offset {
            return Err(NvStatus::INVALID_LIMIT);
        }
        let used: usize = self.mappings.iter().filter(|m| m.object.gpu == gpu).map(|m| m.len).sum();
        if used as u64 + len > bar1 {
            return Err(NvStatus::INSUFFICIENT_RESOURCES);
        }
        if self.files.get(&target).is_none_or(|file| file.gpu != Some(gpu)) {
            return Err(NvStatus::INVALID_ARGUMENT);
        }
        // One mapping for each open file.
        if self.mappings.iter().any(|mapping| mapping.file == target) {
            return Err(NvStatus::INVALID_STATE);
        }
        self.made += 1;
        call.linear = BAR1 + (u64::from(self.made) << 32);
        let size = |value: u64| usize::try_from(value).map_err(|_| NvStatus::INVALID_LIMIT);
        self.mappings.push(Mapping {
            client: call.client,
            memory: call.memory,
            linear: call.linear,
            file: target,
            offset: size(offset)?,
            len: size(len)?,
            object,
            vma: None,
        });
        Ok(())
    }

    /// The mapping for which a file is prepared.
    pub(super) fn prepared(&mut self, file: FileId) -> Option<&mut Mapping> {
        self.mappings.iter_mut().find(|mapping| mapping.file == file)
    }

    pub(super) fn unmap(&mut self, file: FileId, call: &abi::Unmap) -> Outcome {
        self.client(file, call.client)?;
        let wanted = (call.client, call.memory, call.linear);
        let found = self.mappings.iter().position(|m| (m.client, m.memory, m.linear) == wanted);
        let mapping = self.mappings.swap_remove(found.ok_or(NvStatus::INVALID_ADDRESS)?);
        if mapping.vma.is_some_and(|vma| vma.is_there()) {
            self.violations.push(format!("BAR1 given back under the mapping of object {:#x}", call.memory));
        }
        Ok(())
    }
}

impl Client {
    /// Adds an object under a handle, or under one chosen here where that is 0.
    pub(super) fn add(&mut self, parent: u32, handle: u32, kind: Kind) -> Result<u32, NvStatus> {
        let handle = if handle == 0 { FIRST_HANDLE + self.made } else { handle };
        if self.objects.contains_key(&handle) {
            return Err(NvStatus::INSERT_DUPLICATE_NAME);
        }
        self.made += 1;
        self.objects.insert(handle, Entry { parent, kind });
        Ok(handle)
    }

    /// Adds memory under a device of its GPU.
    pub(super) fn add_memory(
        &mut self,
        parent: u32,
        handle: u32,
        memory: Arc<Object>,
    ) -> Result<u32, NvStatus> {
        match self.objects.get(&parent) {
            Some(Entry { kind: Kind::Device { gpu }, .. }) if *gpu == memory.gpu => {
                self.add(parent, handle, Kind::Memory(memory))
            }
            _ => Err(NvStatus::INVALID_OBJECT_PARENT),
        }
    }
}
