package fleet

import (
	"cmp"
	"fmt"
	"slices"
)

// directory is what names stand for, at one moment. It is immutable.
type directory struct {
	// pictures of each model, sorted by key. A configured model without
	// workers has an empty list.
	pictures map[string][]*Picture
	// alias and adapter names, each with everything it may mean.
	alias    map[string][]string
	adapters map[string][]adapter
	all      []*Picture
}

// adapter is a LoRA of one base model.
type adapter struct{ base, name string }

// directory draws the names anew: under mu.
func (f *Fleet) directory() *directory {
	d := &directory{pictures: map[string][]*Picture{}, alias: map[string][]string{}, adapters: map[string][]adapter{}}
	for name, m := range f.models {
		d.pictures[name] = nil
		for _, a := range m.Aliases {
			d.alias[a] = append(d.alias[a], name)
		}
	}
	for _, p := range f.pictures {
		d.all = append(d.all, p)
	}
	slices.SortFunc(d.all, func(a, b *Picture) int {
		return cmp.Or(cmp.Compare(a.Key.Model, b.Key.Model), cmp.Compare(a.Key.Namespace, b.Key.Namespace), cmp.Compare(a.Key.Role, b.Key.Role))
	})
	for _, p := range d.all {
		d.pictures[p.Key.Model] = append(d.pictures[p.Key.Model], p)
		for name, own := range p.Adapters {
			if a := (adapter{p.Key.Model, own}); !slices.Contains(d.adapters[name], a) {
				d.adapters[name] = append(d.adapters[name], a)
			}
		}
	}
	return d
}

// Sets returns the pictures of all worker sets, sorted by model, namespace and
// role. The slice is shared and must not be changed.
func (f *Fleet) Sets() []*Picture { return f.names.Load().all }

// Resolve finds the worker sets that a request asks. It takes no lock.
func (f *Fleet) Resolve(sel Selector) (Resolved, error) {
	d := f.names.Load()
	base, lora, err := d.name(sel.Model)
	if err != nil {
		return Resolved{}, err
	}
	r := Resolved{Model: base, LoraName: sel.LoraName}
	if sel.LoraName != "" {
		r.LoraName = d.adapterOf(base, sel.LoraName)
	}
	if lora != "" {
		if sel.LoraName != "" && r.LoraName != lora {
			return Resolved{}, fmt.Errorf("%w: model %q is the adapter %q, lora_name is %q", ErrLoraContradiction, sel.Model, lora, sel.LoraName)
		}
		r.LoraName = lora
	}
	all := d.pictures[base]
	r.Pictures = narrow(all, sel, lora)
	if len(r.Pictures) == 0 && (len(all) > 0 || sel.Namespace != "" || sel.Role != "") {
		return Resolved{}, fmt.Errorf("%w: %q has no workers in namespace %q, role %q", ErrUnknownModel, sel.Model, sel.Namespace, sel.Role)
	}
	return r, nil
}

// name finds the base model, and the adapter if the name is one's.
func (d *directory) name(model string) (base, lora string, err error) {
	if model == "" {
		return d.only()
	}
	if _, ok := d.pictures[model]; ok {
		return model, "", nil
	}
	if bases := d.alias[model]; len(bases) == 1 {
		return bases[0], "", nil
	} else if len(bases) > 1 {
		return "", "", fmt.Errorf("%w: %q is an alias of %q", ErrAmbiguousModel, model, bases)
	}
	switch as := d.adapters[model]; len(as) {
	case 0:
		return "", "", fmt.Errorf("%w: %q", ErrUnknownModel, model)
	case 1:
		return as[0].base, as[0].name, nil
	default:
		return "", "", fmt.Errorf("%w: adapter %q has several bases", ErrAmbiguousModel, model)
	}
}

// only is the model that is meant where none is named.
func (d *directory) only() (base, lora string, err error) {
	for _, p := range d.all {
		if base != "" && base != p.Key.Model {
			return "", "", fmt.Errorf("%w: there are several, name one", ErrAmbiguousModel)
		}
		base = p.Key.Model
	}
	if base == "" && len(d.pictures) == 1 {
		for base = range d.pictures {
		}
	}
	if base == "" {
		return "", "", fmt.Errorf("%w: there is none", ErrUnknownModel)
	}
	return base, "", nil
}

// adapterOf is the own name of an adapter of base that is called name. One that
// nobody configured keeps the name: an engine may have loaded it by itself.
func (d *directory) adapterOf(base, name string) string {
	for _, a := range d.adapters[name] {
		if a.base == base {
			return a.name
		}
	}
	return name
}

// narrow keeps the sets of the namespace and role, and those that serve lora.
func narrow(all []*Picture, sel Selector, lora string) []*Picture {
	fits := func(p *Picture) bool {
		if sel.Namespace != "" && sel.Namespace != p.Key.Namespace || sel.Role != "" && sel.Role != p.Key.Role {
			return false
		}
		_, serves := p.Adapters[lora]
		return lora == "" || serves
	}
	if !slices.ContainsFunc(all, func(p *Picture) bool { return !fits(p) }) {
		return all
	}
	var out []*Picture
	for _, p := range all {
		if fits(p) {
			out = append(out, p)
		}
	}
	return out
}
