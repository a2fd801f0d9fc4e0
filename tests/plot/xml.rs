//! A strict reader of XML.

use quick_xml::events::{BytesStart, Event};
use quick_xml::{Reader, escape};

#[derive(Debug)]
pub(super) struct Element {
    pub(super) name: String,
    pub(super) attributes: Vec<(String, String)>,
    /// What stands directly in it.
    pub(super) text: String,
}

/// The elements of a document in the order of their beginnings.
#[derive(Debug)]
pub(super) struct Document {
    pub(super) elements: Vec<Element>,
}

impl Element {
    #[track_caller]
    pub(super) fn get(&self, name: &str) -> &str {
        let attribute = self.attributes.iter().find(|(known, _)| known == name);
        attribute.map(|(_, value)| value.as_str()).unwrap_or_else(|| panic!("{self:?} lacks {name}"))
    }

    pub(super) fn get_or<'a>(&'a self, name: &str, other: &'a str) -> &'a str {
        let attribute = self.attributes.iter().find(|(known, _)| known == name);
        attribute.map_or(other, |(_, value)| value)
    }
}

impl Document {
    /// All texts, without the blanks around them.
    pub(super) fn texts(&self) -> Vec<&str> {
        self.elements.iter().map(|element| element.text.trim()).filter(|text| !text.is_empty()).collect()
    }

    /// Full elements of this name and colour.
    pub(super) fn count(&self, name: &str, fill: &str) -> usize {
        let same = |element: &&Element| element.name == name && element.get_or("fill", "") == fill;
        self.elements.iter().filter(same).count()
    }
}

fn element(start: &BytesStart<'_>) -> Element {
    let attributes = start.attributes().map(|attribute| {
        let attribute = attribute.unwrap();
        let value = escape::unescape(&attribute.value).unwrap().into_owned();
        assert!(!attribute.value.contains('<'), "{attribute:?}");
        (attribute.key.0.to_owned(), value)
    });
    Element { name: start.name().0.to_owned(), attributes: attributes.collect(), text: String::new() }
}

/// Reads a document; panics at what XML does not allow.
#[track_caller]
pub(super) fn elements(text: &str) -> Document {
    let bad = |c: char| c.is_control() && !matches!(c, '\n' | '\t' | '\r');
    assert!(!text.contains(bad), "a control character: {text:?}");
    let mut reader = Reader::from_str(text);
    reader.config_mut().enable_all_checks(true);
    let (mut elements, mut open, mut roots) = (Vec::<Element>::new(), Vec::new(), 0);
    loop {
        match reader.read_event().unwrap_or_else(|error| panic!("{error}: {text}")) {
            Event::Start(start) => {
                roots += usize::from(open.is_empty());
                open.push(elements.len());
                elements.push(element(&start));
            }
            Event::Empty(start) => elements.push(element(&start)),
            Event::End(_) => _ = open.pop().unwrap(),
            Event::Text(part) => match open.last() {
                Some(&last) => elements[last].text.push_str(&part),
                None => assert!(part.trim().is_empty(), "text outside of the root: {part:?}"),
            },
            Event::GeneralRef(name) => {
                let last = *open.last().unwrap();
                elements[last].text.push_str(&escape::unescape(&format!("&{};", &*name)).unwrap());
            }
            Event::DocType(_) => {}
            Event::Eof => break,
            other => panic!("not expected: {other:?}"),
        }
    }
    assert!(open.is_empty() && roots == 1, "{} open, {roots} roots", open.len());
    Document { elements }
}
